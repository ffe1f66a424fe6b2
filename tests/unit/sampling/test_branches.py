"""Branches of sampling: on devices where each is a program there are few, and what is idle in one changes nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tests.support.fakes import CapturingBackend, HostBackend, new_request, step
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.records import StepResult
from vllm_gaudi_spec.runner.batch import make_sample_batch
from vllm_gaudi_spec.runner.report import Downloads, Reports
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.sampling.grammar import Grammar
from vllm_gaudi_spec.sampling.params import Branch, Sampling
from vllm_gaudi_spec.sampling.verify import choose_rule, verify

VOCABS = (2, 40, 64, 65, 1500, 50_000)
MOST_LOGPROBS = (0, 1, 5, 20, 30, -1)
K, MAX_ROWS, ROWS, MAX_LEN = 3, 5, 6, 24


def sampling(vocab: int, most: int, captures: bool = True, mode: str = "raw_logprobs") -> Sampling:
    backend = CapturingBackend() if captures else HostBackend()
    return Sampling(backend, max_rows=MAX_ROWS, vocab_size=vocab, max_logprobs=most, logprobs_mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("most", MOST_LOGPROBS)
def test_a_coarse_branch_is_one_of_few_and_its_own_coarse_branch(vocab: int, most: int) -> None:
    counts = sampling(vocab, most).logprob_counts
    every = list(Branch.every_coarse(vocab, counts))
    assert len(set(every)) == len(every) <= 36
    found = {branch.coarse(vocab, counts) for branch in Branch.every(vocab, counts)}
    assert found == set(every)
    assert all(branch.coarse(vocab, counts) == branch for branch in every)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("most", MOST_LOGPROBS)
def test_a_coarse_branch_has_all_that_was_asked(vocab: int, most: int) -> None:
    counts = sampling(vocab, most).logprob_counts
    for fine in Branch.every(vocab, counts):
        coarse = fine.coarse(vocab, counts)
        assert coarse.random == fine.random, "noise is nothing that can be idle"
        for name, own, asked in zip(Branch._fields, coarse, fine, strict=True):
            assert own >= asked, name


# --- the same outcome ---


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
    """Requests with random wishes, some with a grammar, and a step's logits, drafts and laws."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.rng, self.vocab = random.Random(seed), vocab
        generator = torch.Generator().manual_seed(seed)
        # Wishes that are rare together must come alone as well: at times nobody wants more than plain sampling.
        simple = self.rng.random() < 0.3
        self.params = {
            name: SamplingParams(temperature=self.rng.choice([0.0, 1.0]), seed=seed)
            if simple and name != "a"
            else random_params(self.rng, vocab)
            for name in "abcde"[: self.rng.randint(1, MAX_ROWS)]
        }
        few = min(vocab, 12)  # so that tokens come twice
        self.prompts = {name: self.tokens(self.rng.randint(1, 8), few) for name in self.params}
        self.outputs = {name: self.tokens(self.rng.randint(0, 8), few) for name in self.params}
        self.logits = torch.randn(ROWS, K + 1, vocab, generator=generator) * 2
        self.laws = (torch.randn(ROWS, K, vocab, generator=generator) * 2).softmax(-1)
        own = torch.multinomial(self.laws.flatten(0, 1), 1, generator=generator).view(ROWS, K)
        best = self.logits[:, :K].argmax(-1)
        self.drafts = torch.where(torch.rand(ROWS, K, generator=generator) < 0.6, best, own).int()
        self.num_drafts = torch.randint(0, K + 1, (ROWS,), generator=generator).int()
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

    def run(self, captures: bool, mode: str, rule: Any) -> tuple[Branch, ModelRunnerOutput]:
        """As the runner does it."""
        given = sampling(self.vocab, -1, captures, mode)
        backend = given.backend
        requests = Requests(backend, max_rows=MAX_ROWS, max_len=MAX_LEN, block_sizes=[16], max_context=MAX_LEN, seed=0)
        new = [
            new_request(name, self.prompts[name], [1], params=params, prefill=self.prompts[name] + self.outputs[name])
            for name, params in self.params.items()
        ]
        requests.apply(step(dict.fromkeys(self.params, 1), new=new))
        for request in requests.admitted:
            given.admit(request)
        members = [requests.by_id[name] for name in self.params]
        batch = make_sample_batch(requests, ROWS, K + 1, members, [])
        num_drafts_B = self.num_drafts.clone()
        first_B = torch.zeros(ROWS, dtype=torch.int32)
        for index, request in enumerate(members):
            length = len(request.all_token_ids)
            first_B[index] = length - 1
            requests.history_RM[request.row, length : length + K] = self.drafts[index]
        num_drafts_B[len(members) :] = 0
        inputs = given.prepare(batch, self.grammars)
        if inputs.acceptable_B is not None:
            num_drafts_B = torch.minimum(num_drafts_B, inputs.acceptable_B)
        verification = verify(
            self.logits.clone(),
            positions_BQ=first_B[:, None] + torch.arange(K + 1, dtype=torch.int32),
            rows_B=batch.rows_B,
            num_drafts_B=num_drafts_B,
            draft_probs_BKV=self.laws,
            requests=requests,
            inputs=inputs,
            rule=rule,
            custom=None,
            logprobs_mode=mode,
        )
        done = StepResult(members, verification._replace(num_drafts_B=num_drafts_B))
        return inputs.branch, Reports(backend, Downloads(backend, overlap=True)).send(done).get_output()

    def told(self, output: ModelRunnerOutput) -> dict[str, tuple[Any, ...]]:
        """What each request learns: its tokens, and of the log-probabilities what vLLM takes of them."""
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
            # Which of the likeliest of equal scores comes first is nobody's business; forbidden tokens are all equal.
            ids = np.where(own.logprobs[:, :width] > -np.inf, own.logprob_token_ids[:, :width], -1).tolist()
            found[name] = (tokens, ids, scores, own.sampled_token_ranks.tolist())
        return found


RULES = {
    "strict": Speculation(method="draft_model", num_drafts=K, rule="strict", drafting="greedy", drafter_max_len=99),
    "synthetic": Speculation(
        method="draft_model",
        num_drafts=K,
        rule="synthetic",
        drafting="greedy",
        drafter_max_len=99,
        synthetic_rates=(0.9, 0.7, 0.5),
    ),
    **{
        name: Speculation(method="draft_model", num_drafts=K, rule=name, drafting="probabilistic", drafter_max_len=99)
        for name in ("standard", "block")
    },
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize("vocab", [50, 1500])
def test_a_coarse_branch_decides_and_reports_the_same(rule: str, mode: str, vocab: int) -> None:
    chosen, coarser, accepted = choose_rule(RULES[rule], HostBackend()), 0, 0
    listed = set(sampling(vocab, -1).branches())
    for seed in range(40 if vocab == 50 else 15):
        case = Case(seed, vocab)
        (fine, expected), (coarse, found) = case.run(False, mode, chosen), case.run(True, mode, chosen)
        assert coarse in listed
        assert coarse == fine.coarse(vocab, sampling(vocab, -1).logprob_counts)
        assert case.told(found) == case.told(expected), (seed, fine, coarse)
        coarser += fine != coarse
        accepted += sum(map(len, found.sampled_token_ids)) - len(found.sampled_token_ids)
    assert coarser > 8
    assert accepted > 8, "drafts are accepted in these cases"
