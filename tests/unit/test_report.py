"""A step's results reach the host in one copy and in vLLM's own records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors

from vllm_gaudi_spec.runner.report import Report, Step
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


def batch(*requests: Request, finishes: list[bool] | None = None) -> Any:
    return SimpleNamespace(requests=list(requests), finishes=finishes or [True] * len(requests))


def logprobs(rows: int, columns: int, start: float) -> LogprobsTensors:
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + start
    return LogprobsTensors(values.int(), values, torch.arange(rows, dtype=torch.int32))


def test_ragged_tokens_of_two_batches_in_one_read() -> None:
    backend = CountingBackend()
    a, b, c = request("a"), request("b"), request("c")
    decode = Verdict(torch.tensor([[5, 6, 7], [8, 9, 10], [0, 0, 0]], dtype=torch.int32), torch.tensor([2, 3, 1]).int())
    prompt = Verdict(torch.tensor([[4]], dtype=torch.int32), torch.tensor([1]).int())
    output = Report([Step(batch(c), prompt), Step(batch(a, b), decode)], backend).get_output()  # type: ignore[arg-type]
    assert backend.num_host_reads == 1
    assert output.req_ids == ["c", "a", "b"]
    assert output.req_id_to_index == {"c": 0, "a": 1, "b": 2}
    assert output.sampled_token_ids == [[4], [5, 6], [8, 9, 10]]
    assert output.logprobs is None
    assert (a.outputs, b.outputs) == ([5, 6], [8, 9, 10])


def test_unfinished_prompts_answer_with_nothing() -> None:
    backend = CountingBackend()
    a, b = request("a"), request("b")
    both = Verdict(torch.tensor([[5], [6]], dtype=torch.int32), torch.tensor([1, 1]).int())
    steps = [Step(batch(request("c"))), Step(batch(a, b, finishes=[False, True]), both)]
    output = Report(steps, backend).get_output()  # type: ignore[arg-type]
    assert output.sampled_token_ids == [[], [], [6]]
    assert Report(steps[:1], backend).get_output().sampled_token_ids == [[]]  # type: ignore[arg-type]


def test_each_request_gets_the_logprobs_it_asked_for() -> None:
    """One wants the three likeliest, one named two tokens, one wants nothing, in one batch of Q = 2."""
    backend = CountingBackend()
    top, named, none = request("t", logprobs=3), request("n", logprob_token_ids=[1, 2]), request("x")
    tokens = torch.tensor([[5, 6], [7, 8], [9, 0]], dtype=torch.int32)
    step = Step(
        batch(top, named, none),
        Verdict(tokens, torch.tensor([2, 2, 1]).int()),
        logprobs=logprobs(6, 4, 0),
        scores=logprobs(6, 3, 100),
    )
    output = Report([step], backend).get_output()  # type: ignore[arg-type]
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
    output = Report([Step(batch(a), one, prompt_logprobs=[(a, logprobs(4, 2, 0))])], backend).get_output()  # type: ignore[arg-type]
    assert backend.num_host_reads == 1
    values = output.prompt_logprobs_dict["a"]
    assert values is not None
    assert torch.equal(values.logprobs, logprobs(4, 2, 0).logprobs)
