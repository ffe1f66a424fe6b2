"""Thinking budgets: the same tokens with drafts as without."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import CompilingBackend, HostBackend
from tests.support.small_engine import ROOMY, STANDARD, SmallEngine, Variant
from vllm_gaudi_spec.sampling.thinking import ThinkingMarkers

SHORT = ThinkingMarkers(start=(1,), ends=((2,),), forced=(2,))
PHRASE = ThinkingMarkers(start=(1, 7), ends=((2, 3),), forced=(5, 6, 2, 3))
ONLY_PHRASE = ThinkingMarkers(start=(1,), ends=((2, 3), (5, 6)), forced=(5, 6))
MARKERS = {"short": SHORT, "phrase": PHRASE, "only_phrase": ONLY_PHRASE}
BUDGETS = [0, 1, 4, 9, None]
markers_each = pytest.mark.parametrize("markers", MARKERS.values(), ids=MARKERS)


def reasoning_config(markers: ThinkingMarkers) -> Any:
    return SimpleNamespace(
        enabled=True,
        reasoning_start_token_ids=list(markers.start),
        reasoning_end_token_ids=list(markers.forced),
        natural_reasoning_end_token_ids=list(markers.ends[0]),
    )


@markers_each
def test_markers_are_those_of_the_reasoning_config(markers: ThinkingMarkers) -> None:
    assert ThinkingMarkers.from_vllm(SimpleNamespace(reasoning_config=reasoning_config(markers))) == markers
    for config in (None, SimpleNamespace(enabled=False)):
        assert ThinkingMarkers.from_vllm(SimpleNamespace(reasoning_config=config)) is None


def last_begin(text: list[int], marker: tuple[int, ...]) -> int:
    begins = range(len(text) - len(marker), -1, -1)
    return next((at for at in begins if tuple(text[at : at + len(marker)]) == marker), -1)


def forced_token(markers: ThinkingMarkers, text: list[int], budget: int | None) -> int:
    """The token that has to follow a text, or -1."""
    begin = last_begin(text, markers.start)
    if budget is None or begin <= max(last_begin(text, end) for end in markers.ends):
        return -1
    if len(text) - begin - len(markers.start) < budget:
        return -1
    lengths = range(len(markers.forced) - 1, -1, -1)
    return markers.forced[next(n for n in lengths if not n or tuple(text[-n:]) == markers.forced[:n])]


@markers_each
@pytest.mark.parametrize("seed", range(10))
def test_forced_tokens_follow_from_the_text_before_each_position(markers: ThinkingMarkers, seed: int) -> None:
    rng, rows, queries, width = random.Random(seed), 60, 4, 40
    few = [*{*markers.start, *markers.forced, *markers.ends[0]}, 9]
    history = [rng.choices(few, k=width) for _ in range(rows)]
    firsts = [rng.randrange(width - queries + 1) for _ in range(rows)]
    budgets = [rng.choice([None, 0, 1, 3, 8]) for _ in range(rows)]
    positions_BQ = torch.tensor(firsts, dtype=torch.int32)[:, None] + torch.arange(queries, dtype=torch.int32)
    budget_B = torch.tensor([-1 if budget is None else budget for budget in budgets], dtype=torch.int32)
    found = markers.find_forced_tokens(torch.tensor(history, dtype=torch.int32), positions_BQ, budget_B).tolist()
    expected = [
        [forced_token(markers, line[: first + 1 + query], budget) for query in range(queries)]
        for line, first, budget in zip(history, firsts, budgets, strict=True)
    ]
    assert found == expected
    assert len({token for row in expected for token in row}) > 1


def answers(variant: Variant, folder: Path, markers: ThinkingMarkers, **params: Any) -> list[tuple[list[int], int]]:
    """Ask for a text under each budget. Return each text with the number of its prompt's tokens."""
    engine = SmallEngine(variant, folder)
    engine.runner.device_step.verifier._thinking = markers
    prompts = []
    for row, budget in enumerate(BUDGETS):
        prompts.append([20 + row, *markers.forced, 21, *markers.start, *[23, 24][: row % 3]])
        options = dict(seed=row, max_tokens=24, ignore_eos=True, thinking_token_budget=budget) | params
        engine.add(str(row), prompts[-1], SamplingParams(**options))
    engine.finish()
    assert variant.method is None or engine.num_accepted > 0
    return [([*prompt, *engine.texts[str(row)]], len(prompt)) for row, prompt in enumerate(prompts)]


def check_budgets(markers: ThinkingMarkers, texts: list[tuple[list[int], int]]) -> None:
    """At each position, a text goes on as its budget demands."""
    num_forced = 0
    for (text, num_prompt), budget in zip(texts, BUDGETS, strict=True):
        for at in range(num_prompt, len(text)):
            forced = forced_token(markers, text[:at], budget)
            assert forced in (-1, text[at])
            num_forced += forced >= 0
    assert num_forced >= len(markers.forced)


@markers_each
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("backend", [HostBackend, CompilingBackend])
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_texts_equal_those_without_drafts(
    markers: ThinkingMarkers, temperature: float, backend: type[HostBackend], method: str, tmp_path: Path
) -> None:
    """Budgets end inside blocks of drafts. N-grams sometimes draft the rest of a forced phrase."""
    options = dict(temperature=temperature, top_k=3)
    variant = Variant(method, num_blocks=ROOMY, backend=backend, num_drafts=5)
    texts = answers(variant, tmp_path, markers, **options)
    check_budgets(markers, texts)
    assert texts == answers(Variant(num_blocks=ROOMY), tmp_path, markers, **options)


@markers_each
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_with_probabilities_keep_the_budget(markers: ThinkingMarkers, rule: str, tmp_path: Path) -> None:
    variant = Variant(STANDARD, num_blocks=ROOMY, num_drafts=4, rule=rule)
    check_budgets(markers, answers(variant, tmp_path, markers, temperature=0.9, top_k=3))


def test_forced_token_is_sampled_despite_masks_and_penalties(tmp_path: Path) -> None:
    params = dict(temperature=0.0, logit_bias={2: -100.0}, allowed_token_ids=[9, 10, 11], presence_penalty=2.0)
    texts = answers(Variant("ngram", num_blocks=ROOMY), tmp_path, SHORT, **params)
    check_budgets(SHORT, texts)
    text, num_prompt = texts[0]
    assert text[num_prompt] == 2, "its budget is 0"
