"""Thinking budgets: the same tokens with drafts as without, and as upstream's sampler gives without drafts."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import CompilingBackend, HostBackend, make_requests, make_sampling, new_request, step
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.records import SampleShape
from vllm_gaudi_spec.runner.planning import make_sample_batch
from vllm_gaudi_spec.sampling.rules.registry import TORCH
from vllm_gaudi_spec.sampling.thinking import ThinkingMarkers
from vllm_gaudi_spec.sampling.verify import Verifier, choose_rule

VOCAB, ROWS, MAX_LEN, NUM_OUTPUTS = 24, 5, 256, 24
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


@dataclass
class Text:
    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.outputs]


def next_logits(text: list[int], seed: int) -> torch.Tensor:
    """Logits of a model that knows a text's length and last two tokens, and begins neither a section nor a phrase.

    Where a text already ends with the beginning of the phrase, upstream's two runners differ.
    """
    generator = torch.Generator().manual_seed(hash((seed, len(text), *text[-2:])))
    logits_V = 2 * torch.randn(VOCAB, generator=generator)
    logits_V[[1, 5, 7]] -= 100
    return logits_V


def make_texts(markers: ThinkingMarkers, seed: int, temperature: float = 0.0, **params: Any) -> list[Text]:
    rng = random.Random(seed)
    return [
        Text(
            [*rng.choices(range(8, VOCAB), k=3), *markers.start, *rng.choices(range(8, VOCAB), k=row % 3)],
            SamplingParams(temperature=temperature, seed=row, max_tokens=99, thinking_token_budget=budget, **params),
        )
        for row, budget in enumerate(BUDGETS)
    ]


def decode(
    markers: ThinkingMarkers,
    texts: list[Text],
    seed: int,
    num_drafts: int = 0,
    backend: HostBackend | None = None,
    rule: str = "strict",
) -> int:
    """Append output tokens as the runner does, with drafts that are often right. Return how many were accepted."""
    backend, rng, accepted = backend or HostBackend(), random.Random(seed), 0
    speculation = None
    if num_drafts:
        drafting = "greedy" if rule == "strict" else "probabilistic"
        speculation = Speculation(
            method="draft_model", num_drafts=num_drafts, rule=rule, drafting=drafting, drafter_max_len=MAX_LEN
        )
    given = make_sampling(backend, max_rows=ROWS, vocab_size=VOCAB)
    requests = make_requests(backend, max_rows=ROWS, max_len=MAX_LEN, max_context=MAX_LEN)
    new = [new_request(str(row), text.prompt, [1], params=text.params) for row, text in enumerate(texts)]
    requests.apply(step(dict.fromkeys(map(str, range(len(texts))), 1), new=new))
    for request in requests.admitted:
        given.admit(request)
    given.flush()
    members = [requests.by_id[str(row)] for row in range(len(texts))]
    verifier = Verifier(requests, choose_rule(speculation, backend), TORCH, "raw_logprobs", None, markers)
    queries = 1 + num_drafts
    lists = backend.traits.compiles and rule == "strict"
    while min(len(text.outputs) for text in texts) < NUM_OUTPUTS:
        logits_BQV = torch.zeros(len(texts), queries, VOCAB)
        for text, request, logits_QV in zip(texts, members, logits_BQV, strict=True):
            line = text.tokens
            for query in range(queries):
                logits_QV[query] = next_logits(line, seed)
                forced = forced_token(markers, line, text.params.thinking_token_budget)
                right = forced if forced >= 0 and rng.random() < 0.5 else int(logits_QV[query].argmax())
                line.append(right if rng.random() < 0.8 else rng.randrange(VOCAB))
            requests.history_RM[request.row, : len(line)] = torch.tensor(line, dtype=torch.int32)
        branch = given.branch(members, ())
        shape = SampleShape(len(texts), queries, len(texts) * queries if lists else 0)
        batch = make_sample_batch(requests, shape, members, [queries] * len(texts))
        sample_pass = given.make_pass(batch, branch, {})
        rows_B, listed, grammars = sample_pass.split()
        last_B = torch.tensor([len(text.tokens) - 1 for text in texts], dtype=torch.int32)
        positions_BQ = last_B[:, None] + torch.arange(queries, dtype=torch.int32)
        num_drafts_B = torch.full((len(texts),), num_drafts, dtype=torch.int32)
        sampled = (positions_BQ, rows_B, num_drafts_B, given.gather(rows_B, branch, sample_pass.edit_sizes, grammars))
        if listed is not None:
            row_N, query_N = listed.index_2N
            verification = verifier.verify_listed(logits_BQV[row_N, query_N], listed, *sampled)
        else:
            probs_BKV = logits_BQV[:, :-1].softmax(-1) if num_drafts else None
            verification = verifier.verify(logits_BQV, *sampled, probs_BKV)
        for text, tokens, count in zip(
            texts, verification.tokens_BQ.tolist(), verification.num_sampled_B.tolist(), strict=True
        ):
            text.outputs += tokens[:count]
            accepted += count - 1
        requests.advance(rows_B, last_B, verification)
    return accepted


def check_budgets(markers: ThinkingMarkers, texts: list[Text]) -> None:
    """At each position, a text goes on as its budget demands."""
    num_forced = 0
    for text in texts:
        for at in range(len(text.prompt), len(text.tokens)):
            forced = forced_token(markers, text.tokens[:at], text.params.thinking_token_budget)
            assert forced in (-1, text.tokens[at])
            num_forced += forced >= 0
    assert num_forced >= len(markers.forced)


@markers_each
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("backend", [HostBackend, CompilingBackend])
@pytest.mark.parametrize("num_drafts", [2, 7])
def test_texts_equal_those_without_drafts(
    markers: ThinkingMarkers, temperature: float, backend: type[HostBackend], num_drafts: int
) -> None:
    """Budgets end inside blocks of drafts, which sometimes have the forced tokens and sometimes do not."""
    alone, drafted = (make_texts(markers, 0, temperature) for _ in range(2))
    decode(markers, alone, 0)
    assert decode(markers, drafted, 0, num_drafts, backend()) > NUM_OUTPUTS
    for one, other in zip(alone, drafted, strict=True):
        assert one.outputs[:NUM_OUTPUTS] == other.outputs[:NUM_OUTPUTS]
    check_budgets(markers, drafted)


@markers_each
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_with_probabilities_keep_the_budget(markers: ThinkingMarkers, rule: str) -> None:
    texts = make_texts(markers, 1, temperature=0.9)
    assert decode(markers, texts, 1, 4, rule=rule) > NUM_OUTPUTS
    check_budgets(markers, texts)


def test_forced_token_is_sampled_despite_masks_and_penalties() -> None:
    texts = make_texts(SHORT, 2, logit_bias={2: -100.0}, allowed_token_ids=[9, 10, 11], presence_penalty=2.0)
    decode(SHORT, texts, 2, 3)
    check_budgets(SHORT, texts)
    assert all(text.outputs[0] == 2 for text in texts[:1])
