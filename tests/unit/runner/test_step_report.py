"""A step's results reach the host in one copy, as vLLM's own records."""

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.fakes import (
    CapturingBackend,
    HostBackend,
    batches_of,
    make_requests,
    make_sampling,
    new_request,
    step,
)
from tests.support.warm_up import listed as signatures_of
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.outputs import SpeculativeOutput
from vllm_gaudi_spec.records import (
    FAULTY,
    UNVERIFIED,
    DraftRound,
    NoDraftReason,
    PromptScores,
    Request,
    StepResult,
    Verification,
)
from vllm_gaudi_spec.runner.extensions.prompt_logprobs import PromptLogprobs
from vllm_gaudi_spec.runner.planning import list_continuing, list_finishing
from vllm_gaudi_spec.runner.report import Downloads, Report, Reports


def send(step: StepResult, backend: HostBackend) -> Report:
    return Reports(backend, Downloads(backend, overlap=True), StepRecorder()).send(step)


def request(name: str, **params: Any) -> Request:
    return Request(req_id=name, params=SamplingParams(**params), seed_words=(0, 0), prompt=[1])


def logprobs(rows: int, columns: int, start: float) -> LogprobsTensors:
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + start
    return LogprobsTensors(values.int(), values, torch.arange(rows, dtype=torch.int32))


def test_each_request_gets_its_requested_logprobs() -> None:
    """In one batch with Q = 2, one request wants the three likeliest tokens, one named two tokens, and one wants
    nothing."""
    backend = HostBackend()
    top, named, none = request("t", logprobs=3), request("n", logprob_token_ids=[1, 2]), request("x")
    tokens = torch.tensor([[5, 6], [7, 8], [9, 0]], dtype=torch.int32)
    step = StepResult(
        [top, named, none],
        Verification(tokens, torch.tensor([2, 2, 1]).int(), logprobs=logprobs(6, 4, 0), scores=logprobs(6, 3, 100)),
    )
    output = send(step, backend).get_output()
    assert backend.memory.num_host_syncs == 1
    first = output.logprobs.slice_request(0, 2)
    assert first.logprobs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first.sampled_token_ranks.tolist() == [0, 1]
    second = output.logprobs.slice_request(1, 2)
    assert second.logprobs[:, :3].tolist() == [[106, 107, 108], [109, 110, 111]]
    assert (second.logprobs[:, 3] == -torch.inf).all()


class HiddenLogits:
    """A model whose hidden states are its logits."""

    def gather_adapters(self, rows_B: torch.Tensor) -> None:
        return None

    def logits(self, hidden_NH: torch.Tensor, adapters_N: torch.Tensor | None) -> torch.Tensor:
        return hidden_NH.clone()


VOCAB = 30


def expected_scores(hidden_TV: torch.Tensor, following: list[int], num_top: int) -> LogprobsTensors:
    scores, tokens = hidden_TV[: len(following)].log_softmax(-1), torch.tensor(following)[:, None]
    own = scores.gather(1, tokens)
    best = scores.topk(num_top, dim=-1)
    return LogprobsTensors(
        torch.cat((tokens, best.indices), 1).int(), torch.cat((own, best.values), 1), (scores >= own).sum(-1).int()
    )


def same(found: LogprobsTensors | None, expected: LogprobsTensors) -> bool:
    return found is not None and all(torch.equal(*pair) for pair in zip(found[:3], expected[:3], strict=True))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
@pytest.mark.parametrize("chunk", [5, 100, 130, 200])
def test_prompt_logprobs_are_reported_when_the_prompt_ends(
    device: type[HostBackend], chunk: int, overlap: bool
) -> None:
    """Two requests want different numbers and one wants none. Chunks are cut into slices."""
    backend = device()
    listed = shapes(max_num_seqs=4, max_tokens=512, max_len=512, prefill_rows=(1, 2, 4))
    requests = make_requests(backend, max_rows=4, max_len=600, max_context=listed.max_context)
    sampling = make_sampling(backend, vocab_size=VOCAB, max_logprobs=-1)
    chunk_TV, recorder, downloads = torch.zeros(512, VOCAB), StepRecorder(), Downloads(backend, overlap=overlap)
    scoring = PromptLogprobs(HiddenLogits(), chunk_TV, sampling, backend, downloads, recorder)
    recorder.expect(signatures_of(scoring.jobs()))
    wanted = {"a": 3, "b": -1, "c": None}
    length = {"a": 131, "b": 64, "c": 20}
    prompts = {name: torch.randint(VOCAB, (length[name],)).tolist() for name in wanted}
    hidden = {name: torch.randn(length[name], VOCAB) for name in wanted}
    new = [
        new_request(name, prompt, [1], params=SamplingParams(prompt_logprobs=wanted[name]))
        for name, prompt in prompts.items()
    ]
    requests.apply(step(dict.fromkeys(prompts, 1), new=new))
    steps_of: dict[str, LogprobsTensors | None] = {}
    while going := {n: r for n, r in requests.by_id.items() if r.num_computed < r.num_prompt}:
        counts = {name: min(chunk, request.num_prompt - request.num_computed) for name, request in going.items()}
        pending = batches_of(step(counts), requests, listed, {})
        for batch in pending:
            hidden_TV = torch.full((batch.shape.rows, batch.shape.queries, VOCAB), torch.nan)
            for row, member, count in zip(hidden_TV, batch.requests, batch.counts, strict=False):
                row[:count] = hidden[member.req_id][member.num_computed : member.num_computed + count]
            chunk_TV[: batch.shape.tokens] = hidden_TV.flatten(0, 1)
            scoring.after_forward(batch)
        finishing = [member for planned in pending for member, *_ in list_finishing(planned)]
        done = StepResult(finishing)
        scoring.add_to_result(done)
        done.unfinished = [member for planned in pending for member in list_continuing(planned)]
        done.verification = Verification(torch.ones(4, 1).int(), torch.ones(4).int())
        before = backend.memory.num_host_syncs
        output = send(done, backend).get_output()
        assert backend.memory.num_host_syncs == before + 1
        for name in output.prompt_logprobs_dict:
            assert name not in steps_of
            assert counts[name] + going[name].num_computed == length[name], "not before its last chunk"
        steps_of |= output.prompt_logprobs_dict
        for name, count in counts.items():
            going[name].num_computed += count
    assert set(steps_of) == {"a", "b"}
    assert same(steps_of["a"], expected_scores(hidden["a"], prompts["a"][1:], 3))
    assert same(steps_of["b"], expected_scores(hidden["b"], prompts["b"][1:], VOCAB))
    assert not recorder.unexpected


@pytest.mark.parametrize("pieces", [(1,), (2,), (3,), (3, 1), (1, 1, 1)])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_vllm_serializes_prompt_logprobs(pieces: tuple[int, ...], count: int) -> None:
    """The rank of a single scored token has the stride of the table it was cut from."""
    tables = [torch.arange(4 * 9, dtype=torch.int32).view(4, 9) + 100 * index for index in range(len(pieces))]
    scores = [
        PromptScores(wait=lambda table=table: table, num_tokens=num_tokens, num_computed=3, num_requested=count)
        for table, num_tokens in zip(tables, pieces, strict=True)
    ]
    a = request("a", prompt_logprobs=count)
    sent = send(StepResult([a], prompt_logprobs=[(a, scores)]), HostBackend()).get_output().prompt_logprobs_dict["a"]
    serialized = MsgpackEncoder().encode(EngineCoreOutput("a", [1], new_prompt_logprobs_tensors=sent))
    received = MsgpackDecoder(EngineCoreOutput).decode(serialized).new_prompt_logprobs_tensors
    cut = torch.cat([table[:num_tokens] for table, num_tokens in zip(tables, pieces, strict=True)])
    assert received.logprob_token_ids.tolist() == cut[:, : count + 1].tolist()
    assert received.logprobs.view(torch.int32).tolist() == cut[:, 4 : 5 + count].tolist()
    assert received.selected_token_ranks.tolist() == cut[:, 8].tolist()


def test_preempted_request_does_not_score_its_prompt_again() -> None:
    """The user already has the scores, and outputs are prefilled together with the prompt."""
    backend, listed = HostBackend(), shapes(max_num_seqs=4, max_tokens=64, max_len=64)
    requests = make_requests(backend, max_rows=4, max_len=100, max_context=listed.max_context)
    sampling = make_sampling(backend, vocab_size=VOCAB)
    downloads = Downloads(backend, overlap=True)
    scoring = PromptLogprobs(HiddenLogits(), torch.randn(64, VOCAB), sampling, backend, downloads, StepRecorder())
    again = new_request("a", [1, 2, 3], [1], prefill=[1, 2, 3, 4, 5], params=SamplingParams(prompt_logprobs=1))
    requests.apply(step({"a": 5}, new=[again]))
    (batch,) = batches_of(step({"a": 5}), requests, listed, {})
    scoring.after_forward(batch)
    result = StepResult(batch.requests)
    scoring.add_to_result(result)
    assert result.prompt_logprobs == []
    assert backend.memory.num_host_syncs == 0


@pytest.mark.parametrize(
    ("numbers", "rounds"),
    [
        ([2, FAULTY, 0], [DraftRound(("b",), worked=True)]),
        ([FAULTY, FAULTY, 0], [DraftRound(("a", "b"), worked=False)]),
        ([0, FAULTY, 0], [DraftRound(("b",), worked=False)]),
        ([UNVERIFIED, FAULTY, 0], [DraftRound(("b",), worked=True)]),
        ([UNVERIFIED, 0, 0], [DraftRound((), worked=True)]),
        ([1, 0, 0], [DraftRound()]),
        ([0, 0, 0], []),
    ],
)
def test_drafter_faults_are_reported_instead_of_counts(numbers: list[int], rounds: list[DraftRound]) -> None:
    backend = HostBackend()
    verification = Verification(
        torch.tensor([[5, 6], [8, 0], [0, 0]]).int(),
        torch.tensor([2, 1, 1]).int(),
        num_drafts_B=torch.tensor(numbers).int(),
    )
    seen = DraftRound(("c",), worked=False)
    a, b = request("a"), request("b")
    step = StepResult([a, b], verification, started=[b], draft_rounds=[seen])
    output = send(step, backend).get_output()
    assert isinstance(output, SpeculativeOutput)
    assert output.num_real_drafts == {name: max(n, 0) for name, n in zip("ab", numbers, strict=False)}
    assert output.draft_rounds == [*rounds, seen]
    reasons = {FAULTY: NoDraftReason.FAULT, UNVERIFIED: NoDraftReason.UNVERIFIED}
    assert output.why == {name: reasons[n] for name, n in zip("ab", numbers, strict=False) if n < 0}
    assert output.started == ("b",)
