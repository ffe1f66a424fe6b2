"""A step's results reach the host in one copy and in vLLM's own records."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors

from vllm_gaudi_spec.proposers.base import Drafts
from vllm_gaudi_spec.runner.report import Report, SpeculativeOutput, Step
from vllm_gaudi_spec.runner.requests import Request
from vllm_gaudi_spec.sample.verdict import Verdict


class CountingBackend:
    def __init__(self) -> None:
        self.num_host_reads = 0

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_host_reads += 1
        return tensor.clone()


def request(name: str, **params: Any) -> Request:
    return Request(name, SamplingParams(**params), (0, 0), [1])


def logprobs(rows: int, columns: int, start: float) -> LogprobsTensors:
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + start
    return LogprobsTensors(values.int(), values, torch.arange(rows, dtype=torch.int32))


def test_ragged_tokens_in_one_read() -> None:
    backend = CountingBackend()
    a, b, c = request("a"), request("b"), request("c")
    verdict = Verdict(
        torch.tensor([[5, 6, 7], [8, 9, 10], [0, 0, 0]], dtype=torch.int32), torch.tensor([2, 3, 1]).int()
    )
    output = Report(Step([a, b], verdict, unfinished=[c]), backend).get_output()  # type: ignore[arg-type]
    assert backend.num_host_reads == 1
    assert output.req_ids == ["a", "b", "c"]
    assert output.req_id_to_index == {"a": 0, "b": 1, "c": 2}
    assert output.sampled_token_ids == [[5, 6], [8, 9, 10], []], "an unfinished prompt answers with nothing"
    assert output.logprobs is None
    assert (a.outputs, b.outputs, c.outputs) == ([5, 6], [8, 9, 10], [])


def test_a_step_in_which_nobody_samples_reads_nothing() -> None:
    backend = CountingBackend()
    output = Report(Step([], unfinished=[request("c")]), backend).get_output()  # type: ignore[arg-type]
    assert output.sampled_token_ids == [[]]
    assert backend.num_host_reads == 0


def test_each_request_gets_the_logprobs_it_asked_for() -> None:
    """One wants the three likeliest, one named two tokens, one wants nothing, in one batch of Q = 2."""
    backend = CountingBackend()
    top, named, none = request("t", logprobs=3), request("n", logprob_token_ids=[1, 2]), request("x")
    tokens = torch.tensor([[5, 6], [7, 8], [9, 0]], dtype=torch.int32)
    step = Step(
        [top, named, none],
        Verdict(tokens, torch.tensor([2, 2, 1]).int()),
        logprobs=logprobs(6, 4, 0),
        scores=logprobs(6, 3, 100),
    )
    output = Report(step, backend).get_output()  # type: ignore[arg-type]
    assert backend.num_host_reads == 1
    assert output.logprobs is not None
    first = output.logprobs.slice_request(0, 2)
    assert first.logprobs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first.sampled_token_ranks.tolist() == [0, 1]
    second = output.logprobs.slice_request(1, 2)
    assert second.logprobs[:, :3].tolist() == [[106, 107, 108], [109, 110, 111]]
    assert (second.logprobs[:, 3] == -torch.inf).all()


def test_prompt_logprobs_travel_with_the_step_that_ends_the_prompt() -> None:
    backend = CountingBackend()
    a = request("a", prompt_logprobs=1)
    one = Verdict(torch.tensor([[5]], dtype=torch.int32), torch.tensor([1]).int())
    output = Report(Step([a], one, prompt_logprobs=[(a, logprobs(4, 2, 0))]), backend).get_output()  # type: ignore[arg-type]
    assert backend.num_host_reads == 1
    values = output.prompt_logprobs_dict["a"]
    assert values is not None
    assert torch.equal(values.logprobs, logprobs(4, 2, 0).logprobs)


def test_drafts_and_their_number_travel_in_the_same_read() -> None:
    backend = CountingBackend()
    a, b = request("a"), request("b")
    verdict = Verdict(torch.tensor([[5, 6], [8, 0], [0, 0]]).int(), torch.tensor([2, 1, 1]).int())
    drafts = Drafts(torch.tensor([[7], [9], [0]]).int(), torch.tensor([1, 0, 0]).int())
    report = Report(Step([a, b], verdict, num_drafts_B=torch.tensor([1, 1, 0]).int(), drafts=drafts), backend)  # type: ignore[arg-type]
    output = report.get_output()
    assert backend.num_host_reads == 1
    assert isinstance(output, SpeculativeOutput)
    assert output.num_real_drafts == {"a": 1, "b": 1}
    assert report.step is not None
    assert report.step.drafts is not None
    assert report.step.drafts.tokens_BK.tolist() == [[7], [9], [0]]
