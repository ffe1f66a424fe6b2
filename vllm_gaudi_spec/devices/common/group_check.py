"""Runs and checks collectives in each group of ranks at startup.

The first collective in a group creates the group's communicator. On Gaudi, that collective must not be part of a
captured graph, so vllm-gaudi also runs one in `init_device` (quirk N01). These checks also expose an incorrect
network configuration or module map, either of which causes an error or a hang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec.upstream.distributed import groups

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import Memory
    from vllm_gaudi_spec.upstream.distributed import GroupCoordinator

logger = init_logger(__name__)

_SIZE = 128
"""The number of values that each rank sends. It must be even."""


def check_groups(memory: Memory) -> None:
    """Check every tensor-, data-, pipeline-, and expert-parallel group.

    All ranks must call this function with their groups in the same order.
    """
    for reference in groups.values():
        group = reference()
        # Skip destroyed groups, which may still be referenced, and groups without a device communicator, which run on
        # the host.
        if group is None or group.world_size == 1 or not hasattr(group, "device_group"):
            continue
        if getattr(group, "device_communicator", None) is None:
            continue
        if group.rank_in_group == 0:
            logger.info(
                "Running the first collectives of %s. If the log ends here, its ranks cannot reach each other.",
                _name(group),
            )
        check_group(group, memory)


def check_group(group: GroupCoordinator, memory: Memory) -> None:
    """Run collectives in a group. Raise RuntimeError if one of them fails or returns wrong values."""
    name = _name(group)
    sent = [_make_numbers(rank) for rank in range(group.world_size)]
    with torch.inference_mode():
        sent_here = memory.upload(sent[group.rank_in_group])
        _check(name, "all_gather", torch.cat(sent), lambda: group.all_gather(sent_here, dim=0), memory)
        _check(name, "all_reduce", torch.stack(sent).sum(0), lambda: group.all_reduce(sent_here.clone()), memory)
        if group.unique_name.startswith("pp"):
            if not group.is_first_rank:
                received = sent[group.rank_in_group - 1]
                _check(name, "recv", received, lambda: group.recv(sent_here.shape, sent_here.dtype), memory)
            if not group.is_last_rank:
                group.send(sent_here)


def _name(group: GroupCoordinator) -> str:
    return f"group {group.unique_name} (ranks {', '.join(map(str, group.ranks))})"


def _check(name: str, collective: str, expected: torch.Tensor, run: Callable[[], torch.Tensor], memory: Memory) -> None:
    advice = "check the network between these ranks, and that each of them has its own card"
    try:
        found = memory.download(run())
    except Exception as error:
        raise RuntimeError(f"{collective} of {name} failed: {error}; {advice}") from error
    if found.shape != expected.shape:
        raise RuntimeError(f"{collective} of {name} returned a tensor of shape {tuple(found.shape)}; {advice}")
    if len(wrong := (found != expected).nonzero()):
        index = int(wrong[0])
        raise RuntimeError(f"{collective} of {name} returned {found[index]:g} instead of {expected[index]:g}; {advice}")


def _make_numbers(rank: int) -> torch.Tensor:
    """Return float32 values that sum exactly and that differ between ranks and between adjacent elements."""
    return torch.arange(_SIZE) % 7 + 8.0 * rank**2
