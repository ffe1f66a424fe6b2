"""What docs/universal.md and its figure say of the demo pair is what the two tokenizers say."""

import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.full_tests.repetitive import repetitive_prompts
from vllm_gaudi_spec.drafting.universal.encoder import Encoder
from vllm_gaudi_spec.drafting.universal.pairs import Pair, Texts
from vllm_gaudi_spec.drafting.universal.timeline import Timeline
from vllm_gaudi_spec.drafting.universal.token_bytes import load_tokenizer
from vllm_gaudi_spec.drafting.universal.vocab_map import vocab_map
from vllm_gaudi_spec.tools.demo_model import demo_model_path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/universal.md").read_text()
FIGURE = (ROOT / "docs/figures/universal.svg").read_text()
SO_FAR, GOES_ON = "The speculative decoder verifies", " drafts."
TARGET_SIZE, DRAFTER_SIZE = 49152, 16384


@cache
def texts() -> Texts:
    target, drafter = load_tokenizer(demo_model_path()), load_tokenizer(str(ROOT / "demo/draft-other-vocab"))
    return Texts.load(Pair(target, drafter, vocab_map(target, drafter, TARGET_SIZE, DRAFTER_SIZE)))


def row(name: str) -> list[tuple[str, int]]:
    """Tokens and ids of a line of the page's tables."""
    line = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert line is not None, name
    return [(text, int(number)) for text, number in re.findall(r"`([^`]+)` (\d+)", line[1])]


def shown(ids: list[int], spelled: tuple[bytes | None, ...]) -> list[tuple[str, int]]:
    return [((spelled[token] or b"").decode().replace(" ", "␣"), token) for token in ids]


@cache
def encoders() -> tuple[Encoder, Encoder]:
    pair = texts().pair
    return Encoder(pair.target, TARGET_SIZE), Encoder(pair.drafter, DRAFTER_SIZE)


def of_target(text: str) -> list[int]:
    return encoders()[0].encode(text).ids


def of_drafter(text: str) -> list[int]:
    return encoders()[1].encode(text).ids


def test_what_the_drafter_reads() -> None:
    target, drafter = texts().target.bytes_by_id, texts().drafter.bytes_by_id
    written = of_target(SO_FAR)
    assert row("the target wrote") == shown(written, target)
    mapped = texts().pair.mapped(torch.device("cpu")).to_drafter(torch.tensor(written))
    assert row("the drafter reads, `map`") == shown(mapped.tolist(), drafter)
    timeline = Timeline(texts().reader())
    timeline.extend(written)
    assert row("the drafter reads, `retokenize`") == shown(timeline.tokens(0), drafter)


def test_what_it_drafts() -> None:
    target, drafter = texts().target.bytes_by_id, texts().drafter.bytes_by_id
    own = of_drafter(GOES_ON)
    assert row("the drafter would generate") == shown(own, drafter)
    one_by_one = [int(texts().pair.map.draft_to_target[token]) for token in own]
    assert row("drafts with `tli`") == shown(one_by_one, target)
    assert row("drafts with `slem`") == shown(texts().rewriter().rewrite(own, SO_FAR), target)
    said = of_target(SO_FAR + GOES_ON)[len(of_target(SO_FAR)) :]
    assert row("the target generates") == shown(said, target)
    assert said != one_by_one[: len(said)]


def test_the_figure_has_the_same_tokens() -> None:
    reads = "the drafter reads, `retokenize`"
    for name in ("the target wrote", reads, "the drafter would generate", "drafts with `slem`"):
        for token, _ in row(name):
            assert f">{token}</text>" in FIGURE, token
    for number in (TARGET_SIZE, DRAFTER_SIZE, texts().pair.map.num_matched, *(ids[3][1] for ids in map(row, ROWS))):
        assert re.search(rf"\b{number}\b", FIGURE), number


ROWS = ("the target wrote", "the drafter reads, `map`")


def test_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "demo"), *sys.path])
    from training_prompts import OUT_OF_TEMPLATE

    matched = texts().pair.map.target_to_draft >= 0

    def share(found: list[str]) -> int:
        """Percent of tokens with a partner."""
        return round(100 * float(np.mean([matched[token] for text in found for token in of_target(text)])))

    words = " ".join(PAGE.split())
    assert f"has {texts().pair.map.num_matched} of the target's {TARGET_SIZE} tokens in common" in words
    assert (
        f"{share(OUT_OF_TEMPLATE)} % of the tokens in the recipe's {len(OUT_OF_TEMPLATE)} hand-written questions"
        in words
    )
    assert f"{share(repetitive_prompts())} % in the benchmark's repetitive prompts" in words
    assert f"{share([(ROOT / 'LICENSE').read_text()])} % in this project's licence" in words
