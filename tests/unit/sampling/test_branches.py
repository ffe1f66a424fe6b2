"""Sampling branches: devices that capture graphs have few, and unused parts do not change results."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tests.support.fakes import (
    CapturingBackend,
    CompilingBackend,
    HostBackend,
    make_requests,
    make_speculation,
    new_request,
    step,
)
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.records import SampleShape, StepResult
from vllm_gaudi_spec.runner.planning import make_sample_batch
from vllm_gaudi_spec.runner.report import Downloads, Reports
from vllm_gaudi_spec.sampling.branches import Branch
from vllm_gaudi_spec.sampling.grammars import Grammar
from vllm_gaudi_spec.sampling.params import Sampling
from vllm_gaudi_spec.sampling.rules.registry import TORCH
from vllm_gaudi_spec.sampling.verify import Verifier, choose_rule, needs_rectangle

VOCABS = (2, 40, 64, 65, 1500, 50_000)
MOST_LOGPROBS = (0, 1, 5, 20, 30, -1)
K, MAX_ROWS, ROWS, MAX_LEN = 3, 5, 6, 24


def sampling(vocab: int, most: int, backend: HostBackend | None = None, mode: str = "raw_logprobs") -> Sampling:
    backend = backend or CapturingBackend()
    return Sampling(backend, max_rows=MAX_ROWS, vocab_size=vocab, max_logprobs=most, logprobs_mode=mode)


class Grain(NamedTuple):
    """A device's way to choose branches."""

    backend: type[HostBackend]
    coarse: Callable[[Branch, int, tuple[int, ...]], Branch]
    most: int


GRAINS = {
    "captured": Grain(CapturingBackend, Branch.coarsen, 36),
    "compiled": Grain(CompilingBackend, Branch.merge, 4 + 3 * 2),
}
grains = pytest.mark.parametrize("grain", GRAINS.values(), ids=GRAINS)


@grains
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("most", MOST_LOGPROBS)
def test_coarse_branches_are_few_and_idempotent(grain: Grain, vocab: int, most: int) -> None:
    given = sampling(vocab, most, grain.backend())
    counts = given.logprob_counts
    assert len(given.branches) <= grain.most
    assert all(grain.coarse(branch, vocab, counts) == branch for branch in given.branches)


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    asked: dict[str, Any] = dict(temperature=rng.choice([0.0, 0.5, 1.0, 1.7]), seed=rng.randrange(1000))
    tokens = list(range(vocab))
    if rng.random() < 0.5:
        asked |= dict(top_k=rng.choice([0, 1, 5, 64, 65, 1100, vocab - 1, vocab]), min_p=rng.choice([0.0, 0.0, 0.1]))
    if rng.random() < 0.5:
        asked |= dict(top_p=rng.choice([1.0, 0.95, 0.5, 0.01]))
    if rng.random() < 0.3:
        asked |= dict(
            presence_penalty=rng.choice([0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, -0.4]),
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
    if rng.random() < 0.3:
        asked |= dict(logit_bias={rng.choice(tokens): rng.uniform(-5, 5) for _ in range(rng.randint(1, 4))})
    if rng.random() < 0.3:
        asked |= dict(min_tokens=rng.randint(1, 6), stop_token_ids=rng.sample(tokens, 2))
    if rng.random() < 0.3:
        asked |= dict(allowed_token_ids=rng.sample(tokens, rng.randint(1, vocab)))
    if rng.random() < 0.4:
        asked |= dict(logprobs=rng.choice([0, 1, 5, 7, 20, vocab, -1]))
    elif rng.random() < 0.3:
        asked |= dict(logprob_token_ids=rng.sample(tokens, rng.choice([1, 8, 9, 33])))
    params = SamplingParams(**asked)
    if rng.random() < 0.3:
        params._bad_words_token_ids = [[rng.choice(tokens)], [1, rng.choice(tokens)]]
    return params


class Case:
    """Requests with random parameters, some with a grammar, and a step's logits, drafts and draft probabilities."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.rng, self.vocab = random.Random(seed), vocab
        generator = torch.Generator().manual_seed(seed)
        # Rare parameters must also occur alone, so some cases only sample.
        simple = self.rng.random() < 0.3
        self.params = {
            name: SamplingParams(temperature=self.rng.choice([0.0, 1.0]), seed=seed)
            if simple and name != "a"
            else random_params(self.rng, vocab)
            for name in "abcde"[: self.rng.randint(1, MAX_ROWS)]
        }
        few = min(vocab, 12)  # so that tokens repeat
        self.prompts = {name: self.tokens(self.rng.randint(1, 8), few) for name in self.params}
        self.outputs = {name: self.tokens(self.rng.randint(0, 8), few) for name in self.params}
        self.logits = torch.randn(ROWS, K + 1, vocab, generator=generator) * 2
        self.draft_probs = (torch.randn(ROWS, K, vocab, generator=generator) * 2).softmax(-1)
        own = torch.multinomial(self.draft_probs.flatten(0, 1), 1, generator=generator).view(ROWS, K)
        best = self.logits[:, :K].argmax(-1)
        self.drafts = torch.where(torch.rand(ROWS, K, generator=generator) < 0.6, best, own).int()
        self.num_drafts = torch.randint(0, K + 1, (ROWS,), generator=generator).int()
        self.spare = self.rng.randint(0, K)
        words = -(-vocab // 32)
        mask = torch.randint(-(2**31), 2**31, (MAX_ROWS, K + 1, words), generator=generator).int().numpy()
        mask[..., 0] |= 1  # something is always allowed
        self.grammars = {
            name: Grammar(mask[index, : self.rng.randint(1, K + 1)], self.rng.randint(0, K))
            for index, name in enumerate(self.params)
            if self.rng.random() < 0.15
        }

    def tokens(self, count: int, vocab: int) -> list[int]:
        return [self.rng.randrange(vocab) for _ in range(count)]

    def run(self, backend: HostBackend, mode: str, speculation: Speculation) -> tuple[Branch, ModelRunnerOutput]:
        given = sampling(self.vocab, -1, backend, mode)
        requests = make_requests(backend, max_rows=MAX_ROWS, max_len=MAX_LEN, max_context=MAX_LEN)
        new = [
            new_request(name, self.prompts[name], [1], params=params, prefill=self.prompts[name] + self.outputs[name])
            for name, params in self.params.items()
        ]
        requests.apply(step(dict.fromkeys(self.params, 1), new=new))
        for request in requests.admitted:
            given.admit(request)
        members = [requests.by_id[name] for name in self.params]
        branch = given.branch(members, self.grammars)
        lists = backend.traits.compiles and not needs_rectangle(speculation, random=branch.random)
        num_drafts_B = self.num_drafts.clone()
        num_drafts_B[len(members) :] = 0
        # The host knows an upper bound of a row's drafts.
        num_positions = [min(int(number) + self.spare, K) + 1 for number in num_drafts_B[: len(members)]]
        shape = SampleShape(ROWS, K + 1, sum(num_positions) + self.rng.randint(0, 9) if lists else 0)
        batch = make_sample_batch(requests, shape, members, num_positions)
        first_B = torch.zeros(ROWS, dtype=torch.int32)
        for index, request in enumerate(members):
            length = len(request.all_token_ids)
            first_B[index] = length - 1
            requests.history_RM[request.row, length : length + K] = self.drafts[index]
        given.flush()
        sample_pass = given.make_pass(batch, branch, self.grammars)
        rows_B, _, listed, grammars = sample_pass.split()
        inputs = given.gather(rows_B, branch, sample_pass.edit_sizes, grammars)
        if inputs.acceptable_B is not None:
            num_drafts_B = torch.minimum(num_drafts_B, inputs.acceptable_B)
        verifier = Verifier(requests, choose_rule(speculation, HostBackend()), TORCH, mode)
        positions_BQ = first_B[:, None] + torch.arange(K + 1, dtype=torch.int32)
        sampled = (positions_BQ, rows_B, num_drafts_B, inputs)
        logits = self.logits.clone()
        if listed is not None:
            row_N, query_N = listed.index_2N
            verification = verifier.verify_listed(logits[row_N, query_N], listed, *sampled)
        else:
            verification = verifier.verify(logits, *sampled, self.draft_probs)
        done = StepResult(members, verification._replace(num_drafts_B=num_drafts_B))
        return inputs.branch, Reports(backend, Downloads(backend, overlap=True), StepRecorder()).send(done).get_output()

    def told(self, output: ModelRunnerOutput) -> dict[str, tuple[Any, ...]]:
        """Return the tokens of each request, and the log-probabilities that vLLM reads."""
        found: dict[str, tuple[Any, ...]] = {}
        for index, (name, params) in enumerate(self.params.items()):
            tokens = output.sampled_token_ids[index]
            wanted = params.num_logprobs
            if wanted is None:
                found[name] = (tokens,)
                continue
            assert isinstance(output.logprobs, LogprobsLists)
            own = output.logprobs.slice_request(index, len(tokens))
            width = 1 + (self.vocab if wanted < 0 else wanted)
            scores = own.logprobs[:, :width].tolist()
            # The order of equal scores is undefined, and all masked tokens have equal scores.
            ids = np.where(own.logprobs[:, :width] > -np.inf, own.logprob_token_ids[:, :width], -1).tolist()
            found[name] = (tokens, ids, scores, own.sampled_token_ranks.tolist())
        return found


RULES = {
    "strict": make_speculation(K),
    "synthetic": make_speculation(K, rule="synthetic", synthetic_rates=(0.9, 0.7, 0.5)),
    **{name: make_speculation(K, rule=name, drafting="probabilistic") for name in ("standard", "block")},
}


@grains
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize("vocab", [50, 1500])
def test_coarse_branch_gives_same_tokens_and_reports(grain: Grain, rule: str, mode: str, vocab: int) -> None:
    chosen, coarser, accepted = RULES[rule], 0, 0
    backend = grain.backend()
    listed = set(sampling(vocab, -1, backend).branches)
    for seed in range(40 if vocab == 50 else 15):
        case = Case(seed, vocab)
        (fine, expected), (coarse, found) = case.run(HostBackend(), mode, chosen), case.run(backend, mode, chosen)
        assert coarse in listed
        assert coarse == grain.coarse(fine, vocab, sampling(vocab, -1).logprob_counts)
        assert case.told(found) == case.told(expected), (seed, fine, coarse)
        coarser += fine != coarse
        accepted += sum(map(len, found.sampled_token_ids)) - len(found.sampled_token_ids)
    assert coarser > 8
    assert accepted > 8, "drafts are accepted in these cases"
