"""Runs all checks, in an order in which each check relies only on earlier ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.self_test import attention, graphs, memory, noise, ranks, sampling
from vllm_gaudi_spec.self_test.result import (
    ASYNC_SCHEDULING,
    FAILED,
    KV_FROM_FREE_MEMORY,
    KV_IN_FP8,
    NOT_CHECKED,
    PASSED,
    SPECULATION,
    CheckResult,
    Result,
)
from vllm_gaudi_spec.self_test.subject import Failed, NotChecked, Subject

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.upstream.distributed import GroupCoordinator

_DOWNLOAD_SECONDS = 4.0
"""The time limit for checking copies to the host. The whole self-test should take about ten seconds."""


class Check(NamedTuple):
    name: str
    run: Callable[[Subject], str]
    """Returns the measured values, or raises `Failed` or `NotChecked`."""
    advice: str
    """The remedy if the check fails."""
    needed_by: str = ""
    """See `CheckResult.needed_by`."""


_NO_WORKAROUND = (
    "results would be wrong with any options: use a different release of the device's software, or VGS_DEVICE=cpu"
)
_GREEDY_ONLY = "sampling would be wrong: set VGS_SELF_TEST=0 and serve requests with temperature 0 only"

COPIES = "copies"
HASH = "hash"
NOISE = "noise"
SAMPLING = "sampling"
KV_WRITES = "KV writes"
ATTENTION = "attention"
PROMPT_ATTENTION = "prompt attention"
VERIFY_ATTENTION = "verify attention"
REPLAYED_ATTENTION = "replayed attention"
FP8_KV = "KV in FP8"
CAPTURED_STEP = "captured step"
SECOND_CALL = "second call"
DOWNLOADS = "async downloads"
COLLECTIVES = "collectives"
MEMORY = "memory"

CHECKS = (
    Check(COPIES, memory.check_copies, _NO_WORKAROUND),
    Check(HASH, noise.check_hash, _GREEDY_ONLY),
    Check(NOISE, noise.check_noise, _GREEDY_ONLY),
    Check(SAMPLING, sampling.check_sampling, _GREEDY_ONLY),
    Check(KV_WRITES, attention.check_writes, _NO_WORKAROUND),
    Check(ATTENTION, attention.check_decode, _NO_WORKAROUND),
    Check(
        PROMPT_ATTENTION,
        attention.check_prompts,
        f"on an NPU set {environment.PROMPT_MASKS.name}=dense; on other devices {_NO_WORKAROUND}",
    ),
    Check(VERIFY_ATTENTION, attention.check_verify, "leave out --speculative-config", SPECULATION),
    Check(REPLAYED_ATTENTION, attention.check_replays, _NO_WORKAROUND),
    Check(FP8_KV, attention.check_fp8_kv, "leave out --kv-cache-dtype", KV_IN_FP8),
    Check(CAPTURED_STEP, graphs.check_captured, _NO_WORKAROUND),
    Check(
        SECOND_CALL,
        graphs.check_second_call,
        "requests would wait for the compiler: with VGS_SELF_TEST=0 results are correct, but slow at first",
    ),
    Check(DOWNLOADS, memory.check_downloads, "set --no-async-scheduling", ASYNC_SCHEDULING),
    Check(COLLECTIVES, ranks.check_collectives, "leave out --tensor-parallel-size"),
    Check(MEMORY, memory.check_memory, "set --kv-cache-memory-bytes", KV_FROM_FREE_MEMORY),
)


def self_test(
    backend: DeviceBackend,
    dtype: torch.dtype,
    group: GroupCoordinator | None = None,
    seconds: float = _DOWNLOAD_SECONDS,
) -> Result:
    """Run all checks.

    Args:
        backend: The device to test.
        dtype: The model's dtype.
        group: The ranks that share a model, all of which must call this function together, or None for a single rank.
        seconds: The time limit for checking copies to the host. The other checks take little time.
    """
    with torch.inference_mode():
        found = tuple(_run(check, backend, dtype, group, seconds) for check in CHECKS)
    traits = backend.traits
    return Result(device=traits.name, mode=traits.mode, dtype=str(dtype).removeprefix("torch."), checks=found)


def _run(
    check: Check, backend: DeviceBackend, dtype: torch.dtype, group: GroupCoordinator | None, seconds: float
) -> CheckResult:
    started = time.perf_counter()
    try:
        subject = Subject(backend=backend, dtype=dtype, group=group, seconds=seconds)
        status, detail = PASSED, check.run(subject)
    except Failed as error:
        status, detail = FAILED, str(error)
    except NotChecked as error:
        status, detail = NOT_CHECKED, str(error)
    except Exception as error:  # a device may raise any exception, and the remaining checks are still useful
        status, detail = FAILED, f"{type(error).__name__}: {in_one_line(error)}"
    return CheckResult(
        name=check.name,
        status=status,
        detail=detail,
        advice=check.advice if status == FAILED else "",
        needed_by=check.needed_by,
        seconds=time.perf_counter() - started,
    )


_results: dict[tuple[torch.dtype, int], Result] = {}


def check_device_once(dtype: torch.dtype, group: GroupCoordinator | None) -> Result:
    """Run the self-test once per process, dtype, and number of ranks, because each process has a single device."""
    key = dtype, 1 if group is None else group.world_size
    if key not in _results:
        _results[key] = self_test(load_backend(), dtype, group)
    return _results[key]
