"""Checks that captured graphs return the same results as uncaptured functions, and that they are captured only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.sampling import noise
from vllm_gaudi_spec.sampling.rules import strict
from vllm_gaudi_spec.self_test.subject import Failed, NotChecked, Subject, random

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Verification

_ROWS, _DRAFTS, _VOCAB = 6, 3, 1000
_STEPS = 3


class _Step(NamedTuple):
    """The arguments to `Rules.strict_random`."""

    logits_BQV: torch.Tensor
    drafts_BK: torch.Tensor
    num_drafts_B: torch.Tensor
    temperature_B: torch.Tensor
    keys_B2: torch.Tensor
    positions_BQ: torch.Tensor


def check_captured(subject: Subject) -> str:
    """Check replays of a verify step under the default rule, with different logits, drafts, and positions."""
    memory, rule = subject.backend.memory, subject.backend.rules.strict_random
    captured = _captured(subject.backend)
    for seed in range(_STEPS):
        plain = _on_host(subject, rule(*map(memory.upload, _step(subject.backend, seed))))
        found = _on_host(subject, captured(*map(memory.upload, _step(subject.backend, seed))))
        for name, theirs, ours in zip(("tokens", "numbers of tokens"), found, plain, strict=True):
            if not torch.equal(theirs, ours):
                raise Failed(
                    f"in run {seed + 1} of a captured verify step, {int((theirs != ours).sum())} of {ours.numel()} "
                    f"{name} differ from the same step uncaptured"
                )
    return f"{_STEPS} verify steps with up to {_num_drafts(subject.backend)} drafts"


def check_second_call(subject: Subject) -> str:
    """Check that only the first calls to a graph compile anything, according to the device's own counter."""
    memory = subject.backend.memory
    counts = [_num_compiled(subject.backend)]
    captured = _captured(subject.backend)
    for seed in range(_STEPS):
        # Use different sizes than the preceding check, whose graphs are already compiled.
        step = (tensor[1:] for tensor in _step(subject.backend, seed))
        _on_host(subject, captured(*map(memory.upload, step)))
        subject.backend.graphs.step_done()
        counts.append(_num_compiled(subject.backend))
    before, first, *later = counts
    if first == before:
        raise NotChecked("the device counted no compilation when a graph was captured, or had compiled it before")
    if later[-1] != first:
        raise Failed(f"the next {len(later)} calls of a graph compiled {later[-1] - first} more")
    return f"{first - before} compiled by the first call of a graph, none by the next {len(later)}"


def _num_compiled(backend: DeviceBackend) -> int:
    counts = backend.graphs.counts()
    if "compiled_after_warmup" not in counts:
        raise NotChecked("the device compiles nothing, or does not count it")
    return int(counts["compiled_in_warmup"]) + int(counts["compiled_after_warmup"])


def _captured(backend: DeviceBackend) -> Callable[..., Verification]:
    def self_test_step(*step: torch.Tensor) -> Verification:
        return backend.rules.strict_random(*step)

    return backend.graphs.graph(self_test_step)


def _num_drafts(backend: DeviceBackend) -> int:
    return min(_DRAFTS, backend.traits.max_drafts)


def _step(backend: DeviceBackend, seed: int) -> _Step:
    """Return a verify step whose rows have 0 to K drafts, some of which are correct. The last row's request is
    greedy."""
    num_drafts = _num_drafts(backend)
    logits_BQV = random((_ROWS, num_drafts + 1, _VOCAB), seed) * 3
    temperature_B = torch.ones(_ROWS)
    temperature_B[-1] = 0
    keys_B2 = torch.tensor([noise.fold_seed(10 * seed + row) for row in range(_ROWS)], dtype=torch.int32)
    positions_BQ = (torch.arange(_ROWS)[:, None] * 100 + seed + torch.arange(num_drafts + 1)).int()
    drafts_BK = strict.sample_random(logits_BQV, temperature_B, keys_B2, positions_BQ)[:, :num_drafts].clone()
    drafts_BK[1, 0] += 1
    drafts_BK[2, -1] += 1
    num_drafts_B = ((torch.arange(_ROWS) + seed) % (num_drafts + 1)).int()
    return _Step(logits_BQV, drafts_BK, num_drafts_B, temperature_B, keys_B2, positions_BQ)


def _on_host(subject: Subject, verified: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    download = subject.backend.memory.download
    return download(verified.tokens_BQ).clone(), download(verified.num_sampled_B).clone()
