"""Drafting with real models, of the target's tokenizer and of others: texts equal those without drafts.

The tiny models of test_draft_model.py show more schedules; here drafters are often right for the reason they are made
for, vocabularies are large, and Gemma 3 brings sliding windows beside full attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.gemma import gemma_path
from tests.full_tests.prompts import PROMPTS
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import accepted, speculating
from tests.full_tests.test_draft_model import COUPLED, STRICT, drafting
from vllm_gaudi_spec.tools.demo_model import demo_model_path

DRAFTERS = Path(__file__).parents[2] / "demo"
MODELS: dict[str, Callable[[], str]] = {
    "smollm2": demo_model_path,
    "gemma3": gemma_path,
    "same-vocab": lambda: str(DRAFTERS / "draft-same-vocab"),
    "other-vocab": lambda: str(DRAFTERS / "draft-other-vocab"),
}
NUM_TOKENS = 48
WINDOW = 512  # Gemma's
# Few rows: with 262,144 tokens in the vocabulary each row and draft of a step weighs a megabyte, several times.
SMALL = dict(max_num_seqs=12, kv_cache_memory_bytes=256 << 20, max_model_len=256)
LONG = SMALL | dict(max_num_seqs=4, max_model_len=WINDOW + 256, max_num_batched_tokens=256)


@dataclass(frozen=True, eq=False)
class Work:
    target: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    options: dict[str, Any]

    @property
    def path(self) -> str:
        return MODELS[self.target]()


def prompt_of(target: str, text: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(MODELS[target]())
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Gemma is lost without its beginning of text; SmolLM2 was trained without one.
    return [tokenizer.bos_token_id, *ids] if target == "gemma3" else ids


@cache
def mixed(target: str) -> Work:
    """Each prompt greedy and seeded, all in one batch: prose, code, numbers, accents."""
    # A row of Gemma's costs several of SmolLM2's: half of its weights are its vocabulary.
    chosen = (0, 2, 15) if target == "gemma3" else (0, 1, 2, 7, 15, 16)
    prompts = [prompt_of(target, PROMPTS[i]) for i in chosen]
    greedy = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True) for _ in prompts]
    seeded = [
        SamplingParams(temperature=0.8, seed=100 + i, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return Work(target, [*prompts, *prompts], [*greedy, *seeded], SMALL)


@cache
def past_the_window(target: str) -> Work:
    """Prompts of less and more than the window, and one whose answer crosses it."""
    whole = prompt_of(target, " ".join(PROMPTS * 3))
    prompts = [whole[:length] for length in (WINDOW - 200, WINDOW - NUM_TOKENS // 2, WINDOW + 150)]
    assert len(prompts[-1]) > WINDOW
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return Work(target, prompts, [greedy] * len(prompts), LONG)


@pytest.fixture(scope="module")
def plain() -> Callable[[Work], list[list[int]]]:
    """What the target says without drafts; asked once for each kind of work."""

    @cache
    def answers(work: Work) -> list[list[int]]:
        with engine(work.path, **work.options) as llm:
            return first_tokens(generate(llm, work.prompts, work.params))

    return answers


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Reference]:
    """Loaded when two answers differ, and not before."""
    return cache(Reference)


def check(llm: LLM, work: Work, expected: list[list[int]], reference: Callable[[str], Reference]) -> None:
    tally = Tally()
    outputs = first_tokens(generate(llm, work.prompts, work.params))
    for index, (prompt, params, output, said) in enumerate(
        zip(work.prompts, work.params, outputs, expected, strict=True)
    ):

        def scores_at(
            place: int, prompt: list[int] = prompt, said: list[int] = said, params: SamplingParams = params
        ) -> torch.Tensor:
            return reference(work.path).scores(prompt + said[:place], params)

        tally.compare(f"{index}: temperature {params.temperature}", output, said, scores_at)
    drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
    print(f"{accepted(llm)} of {drafted} drafts accepted")
    tally.check()
    assert accepted(llm) > 0.05 * drafted > 0, "too little was accepted for this to show anything"


ALL = [
    (target, drafter, k, options)
    for target, drafter in (("smollm2", "same-vocab"), ("smollm2", "other-vocab"), ("gemma3", "smollm2"))
    for k in (1, 3, 5)
    for options in (STRICT, COUPLED)
]


def name(value: Any) -> str:
    return value.get("draft_sample_method", "greedy") if isinstance(value, dict) else str(value)


@pytest.mark.slow  # CI's real pair is that of test_spec_decode_script.py
@pytest.mark.parametrize(("target", "drafter", "k", "options"), ALL, ids=name)
def test_greedy_and_seeded(
    target: str, drafter: str, k: int, options: dict[str, Any], plain: Any, reference: Any
) -> None:
    work = mixed(target)
    expected = plain(work)
    method = "draft_model" if drafter == "same-vocab" else "universal_draft"
    with speculating(work.path, drafting(MODELS[drafter](), k, method, **options), **work.options) as llm:
        check(llm, work, expected, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "drafter"), [("smollm2", "other-vocab"), ("gemma3", "smollm2")])
@pytest.mark.parametrize(("match", "options"), [("tli", STRICT), ("tli", COUPLED), ("slem", STRICT)], ids=name)
def test_in_the_drafters_own_tokens(
    match: str, options: dict[str, Any], target: str, drafter: str, plain: Any, reference: Any
) -> None:
    """The drafter reads the text as its own tokenizer cuts it."""
    work = mixed(target)
    expected = plain(work)
    reading = {"gaudi_spec": dict(universal_context="retokenize", universal_match=match)}
    config = drafting(MODELS[drafter](), 3, "universal_draft", **options)
    with speculating(work.path, config, additional_config=reading, **work.options) as llm:
        check(llm, work, expected, reference)


def kv_groups(llm: LLM) -> set[tuple[str, str]]:
    """Whose layers have KV cache groups of their own, and of which kind."""
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    return {
        ("drafter" if group.layer_names[0].startswith("draft_model.") else "target", type(group.kv_cache_spec).__name__)
        for group in groups
    }


@pytest.mark.slow
@pytest.mark.parametrize(("target", "drafter"), [("gemma3", "smollm2"), ("smollm2", "gemma3")])
def test_sliding_windows_on_either_side(target: str, drafter: str, plain: Any, reference: Any) -> None:
    """Gemma's sliding and full layers are KV cache groups of their own, as the target's or as the drafter's."""
    work = past_the_window(target)
    expected = plain(work)
    with speculating(work.path, drafting(MODELS[drafter](), 3, "universal_draft"), **work.options) as llm:
        # A drafter's blocks are all kept, so that it may catch up; its layers look no further back for that.
        full = {("target", "FullAttentionSpec"), ("drafter", "FullAttentionSpec")}
        assert kv_groups(llm) == full | ({("target", "SlidingWindowSpec")} if target == "gemma3" else set())
        check(llm, work, expected, reference)
