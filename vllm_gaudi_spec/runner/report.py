"""A step's results on their way to the host: everything in one copy, then vLLM's own records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_gaudi_spec.sample.verdict import Verdict

if TYPE_CHECKING:
    from vllm_gaudi_spec.backends.base import DeviceBackend
    from vllm_gaudi_spec.runner.requests import Request


@dataclass(slots=True)
class Step:
    """What a step leaves behind: B rows that sampled at Q positions each, and requests whose prompt goes on."""

    requests: list[Request]
    verdict: Verdict | None = None
    """None when nobody sampled."""
    logprobs: LogprobsTensors | None = None
    """B * Q rows: the sampled token and the likeliest."""
    scores: LogprobsTensors | None = None
    """B * Q rows: the sampled token and those a request named."""
    prompt_logprobs: list[tuple[Request, LogprobsTensors]] = field(default_factory=list)
    unfinished: list[Request] = field(default_factory=list)

    def to_host(self, copy: _Copy) -> Step:
        """The same record over host tensors."""
        verdict = self.verdict and Verdict(copy.take(self.verdict.tokens_BQ), copy.take(self.verdict.num_sampled_B))
        prompt = [(request, copy.take_logprobs(values)) for request, values in self.prompt_logprobs]
        logprobs = self.logprobs and copy.take_logprobs(self.logprobs)
        scores = self.scores and copy.take_logprobs(self.scores)
        return Step(self.requests, verdict, logprobs, scores, prompt, self.unfinished)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that must reach the host, in the order in which `to_host` takes it."""
        if self.verdict is not None:
            yield from (self.verdict.tokens_BQ, self.verdict.num_sampled_B)
        for _, values in self.prompt_logprobs:
            yield from values[:3]
        for record in (self.logprobs, self.scores):
            yield from (record or ())[:3]


class _Copy:
    """All results in one int32 tensor, copied to the host at once and cut up again there."""

    def __init__(self, tensors: list[torch.Tensor], backend: DeviceBackend) -> None:
        self._backend = backend
        self._words = torch.cat([t.contiguous().view(torch.int32).flatten() for t in tensors]) if tensors else None
        self._begin = 0

    def wait(self) -> None:
        if self._words is not None:
            self._words = self._backend.download(self._words)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        assert self._words is not None
        begin, self._begin = self._begin, self._begin + like.numel()
        return self._words[begin : self._begin].view(like.dtype).view(like.shape)

    def take_logprobs(self, like: LogprobsTensors) -> LogprobsTensors:
        return LogprobsTensors(*(self.take(tensor) for tensor in like[:3]))


class Report(AsyncModelRunnerOutput):
    """Packs a step's results when made, before the next step changes them; copies and waits in `get_output`."""

    def __init__(self, step: Step, backend: DeviceBackend) -> None:
        self._step = step
        self._copy = _Copy(list(step.tensors()), backend)

    def get_output(self) -> ModelRunnerOutput:
        """Called once."""
        self._copy.wait()
        step = self._step.to_host(self._copy)
        rows = list(_rows(step))
        for request, new, _ in rows:
            request.outputs.extend(new)
        return ModelRunnerOutput(
            req_ids=[request.req_id for request, _, _ in rows],
            req_id_to_index={request.req_id: index for index, (request, _, _) in enumerate(rows)},
            sampled_token_ids=[new for _, new, _ in rows],
            logprobs=_join([logprobs for _, _, logprobs in rows], [len(new) for _, new, _ in rows]),
            prompt_logprobs_dict={request.req_id: values for request, values in step.prompt_logprobs},
        )


def _rows(step: Step) -> Iterator[tuple[Request, list[int], LogprobsLists | None]]:
    """Each request of a step with its new tokens and, when it asked, their log-probabilities."""
    for index, request in enumerate(step.requests):
        assert step.verdict is not None
        width = step.verdict.tokens_BQ.shape[1]
        count = int(step.verdict.num_sampled_B[index])
        source = step.scores if request.params.logprob_token_ids else step.logprobs
        logprobs = None
        if source is not None and request.params.num_logprobs is not None:
            begin = index * width
            logprobs = LogprobsLists(*(tensor[begin : begin + count].numpy() for tensor in source[:3]))
        yield request, step.verdict.tokens_BQ[index, :count].tolist(), logprobs
    for request in step.unfinished:
        yield request, [], None


def _join(parts: list[LogprobsLists | None], counts: list[int]) -> LogprobsLists | None:
    """One table over all tokens of the step; requests that asked for less leave columns or rows empty."""
    width = max((part.logprobs.shape[1] for part in parts if part is not None), default=0)
    if not width:
        return None
    offsets = np.cumsum([0, *counts])
    ids = np.zeros((offsets[-1], width), dtype=np.int32)
    scores = np.full((offsets[-1], width), -np.inf, dtype=np.float32)
    ranks = np.zeros(offsets[-1], dtype=np.int32)
    for part, begin, end in zip(parts, offsets, offsets[1:], strict=False):
        if part is not None:
            columns = part.logprobs.shape[1]
            ids[begin:end, :columns], scores[begin:end, :columns] = part.logprob_token_ids, part.logprobs
            ranks[begin:end] = part.sampled_token_ranks
    return LogprobsLists(ids, scores, ranks, offsets.tolist())
