"""Drafting heads: the trained tiny family in demo/, text for it, and what heads draft behind which context."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.full_tests.equality import Tally
from tests.full_tests.prompts import PROMPTS
from tests.full_tests.workload import Request, mixed_requests
from vllm_gaudi_spec.drafting.head import HeadProposer
from vllm_gaudi_spec.drafting.medusa import MedusaProposer
from vllm_gaudi_spec.records import Drafted, DraftRequest, Drafts

TINY = Path(__file__).parents[2] / "demo" / "tiny"
METHODS = ("eagle", "eagle3", "mtp", "medusa")
MAX_LEN = 512


def target(method: str) -> str:
    """The model that a head of this kind was trained for. One with an MTP layer brings its head along."""
    return str(TINY / ("mtp" if method == "mtp" else "target"))


def head(method: str, k: int, **options: Any) -> dict[str, Any]:
    """The speculative configuration."""
    model = {} if method == "mtp" else {"model": str(TINY / method)}
    return dict(method=method, num_speculative_tokens=k, **model, **options)


def with_four_heads(folder: str, copy: Path) -> str:
    """The tiny Llama, or a head for it, with a fourth attention head that says nothing: of three, two ranks cannot
    have as many each."""
    shutil.copytree(folder, copy)
    described = json.loads((copy / "config.json").read_text())
    size, missing = described["head_dim"], 4 - described["num_attention_heads"]
    (copy / "config.json").write_text(json.dumps(described | {"num_attention_heads": 4}))
    weights = load_file(copy / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = torch.cat((weight, weight.new_zeros(missing * size, weight.shape[1])))
        elif name.endswith("o_proj.weight"):
            weights[name] = torch.cat((weight, weight.new_zeros(weight.shape[0], missing * size)), dim=1)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)


# --- text ---


@cache
def _tokens() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target("eagle"))
    return [tokenizer.encode(text) for text in PROMPTS]


def text(length: int, first: int = 0) -> list[int]:
    """So many tokens of readable text. Texts with another `first` begin otherwise."""
    whole = [token for tokens in _tokens()[first:] for token in tokens]
    whole *= 1 + length // len(whole)
    return whole[:length]


def texts() -> list[list[int]]:
    """Prompts as they come, and some of more than a chunk and of more than a block."""
    return [*_tokens(), *(text(length, first) for first, length in enumerate((31, 32, 33, 64, 65, 100, 129, 200, 333)))]


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def busy_requests() -> list[Request]:
    """Noise of all kinds, and text; among it requests that want no drafts, or one, and some that reach the longest
    context that the engine serves."""
    requests = list(mixed_requests(32))
    wishes: list[dict[str, Any]] = [{}, {"num_speculative_tokens": 0}, {}, {"num_speculative_tokens": 1}]
    for index, prompt in enumerate(texts()):
        chance = dict(temperature=0.0) if index % 2 else dict(temperature=0.7, seed=index)
        kind = dict(**chance, extra_args=wishes[index // 2 % len(wishes)])
        requests.append(
            Request(f"text {index}: {kind}", prompt, SamplingParams(max_tokens=32, ignore_eos=True, **kind))
        )
    for left in (1, 2, 9):
        requests.append(Request(f"{left} left", text(MAX_LEN - left, first=left), greedy(left)))
    return requests


# --- drafts ---


class Round(NamedTuple):
    """What a head drafted behind one context."""

    drafts: list[int]
    logits_KV: torch.Tensor


Rounds = dict[tuple[int, ...], list[Round]]
"""By context: prompt and outputs, the newest token included. More than one where a request came twice."""


@contextmanager
def watched() -> Iterator[Rounds]:
    """All rounds of the engines that run within, whatever the schedule they are run on."""
    rounds: Rounds = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        for proposer in (HeadProposer, MedusaProposer):
            patch.setattr(proposer, "propose", _watching(proposer.propose, rounds))
        yield rounds


def _watching(propose: Callable[[Any, DraftRequest], Drafts], rounds: Rounds) -> Callable[[Any, DraftRequest], Drafts]:
    def watching(self: Any, request: DraftRequest) -> Drafts:
        logits: list[torch.Tensor] = []

        def choose(logits_BV: torch.Tensor, before: int) -> Drafted:
            logits.append(logits_BV.clone())
            return request.choose(logits_BV, before)

        drafts = propose(self, replace(request, choose=choose))
        logits_BKV = torch.stack(logits, dim=1)
        counts = drafts.num_drafts_B.tolist()
        for row, (place, length) in enumerate(zip(request.rows_B.tolist(), request.lengths_B.tolist(), strict=True)):
            if count := counts[row]:
                context = tuple(request.history_RM[place, :length].tolist())
                drafted = drafts.tokens_BK[row, :count].tolist()
                rounds[context].append(Round(drafted, logits_BKV[row, :count].clone()))
        return drafts

    return watching


def compare(rounds: Rounds, reference: Rounds, least: int) -> int:
    """The same drafts behind the same contexts, of which there are to be so many at least; the number of ties.

    A round that had use for fewer drafts made the first of them.
    """
    tally, compared = Tally(), 0
    for context, ours in rounds.items():
        for drafts, _ in ours:
            known = max(reference.get(context, ()), key=lambda one: len(one.drafts), default=None)
            if known is None:
                continue
            compared += 1
            both = min(len(drafts), len(known.drafts))
            tally.compare(f"{len(context)} tokens", drafts[:both], known.drafts[:both], known.logits_KV.__getitem__)
    assert compared >= least, f"{compared} contexts in common, of {len(rounds)} and {len(reference)}"
    tally.check()
    return tally.ties
