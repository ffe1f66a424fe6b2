"""A step's results reach the host in one copy, as vLLM's own records."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.fakes import CapturingBackend, HostBackend
from tests.support.small_engine import _HASHED, ROOMY, SmallEngine, Variant, _logits, _number
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


def expected_scores(prompt: list[int], num_top: int) -> LogprobsTensors:
    sums_T = _number(torch.tensor(prompt), torch.arange(len(prompt))).cumsum(0) % _HASHED
    scores, tokens = _logits(sums_T[:-1]).log_softmax(-1), torch.tensor(prompt[1:])[:, None]
    own, best = scores.gather(1, tokens), scores.topk(num_top, dim=-1)
    ids, values = torch.cat((tokens, best.indices), 1).int(), torch.cat((own, best.values), 1)
    return LogprobsTensors(ids, values, (scores >= own).sum(-1).int())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_prompt_logprobs_are_reported_once(device: type[HostBackend], overlap: bool, tmp_path: Path) -> None:
    """Prompts come in chunks and slices, and are computed again after a preemption, when the user has the scores."""
    engine = SmallEngine(Variant(overlap=overlap, backend=device, num_blocks=ROOMY), tmp_path)
    found: dict[str, LogprobsTensors] = {}
    update = engine.scheduler.update_from_output

    def update_from_output(*given: Any) -> Any:
        outputs = update(*given)
        for sent in (sent for part in outputs.values() for sent in part.outputs):
            if sent.new_prompt_logprobs_tensors is not None:
                assert sent.request_id not in found
                found[sent.request_id] = sent.new_prompt_logprobs_tensors
        return outputs

    engine.scheduler.update_from_output = update_from_output
    wanted = {"a": 3, "b": 20, "c": None}
    prompts = {"a": list(range(50, 95)), "b": list(range(20, 45)), "c": list(range(9, 20))}
    for name, prompt in prompts.items():
        engine.add(name, prompt, SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=wanted[name]))
    while not all(engine.texts.values()):
        engine.step()
    engine.interrupt()
    engine.finish()
    assert engine.runner.backend.memory.num_host_syncs <= engine.num_steps
    assert set(found) == {"a", "b"}
    for name, scores in found.items():
        for ours, expected in zip(scores[:3], expected_scores(prompts[name], wanted[name])[:3], strict=True):
            torch.testing.assert_close(ours, expected)


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
