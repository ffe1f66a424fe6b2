"""Checks of collectives between the ranks of a model in captured graphs. All ranks run these checks together.

The worker has already set up each group's connections (`group_check.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_gaudi_spec.self_test.subject import Failed, NotChecked, Subject

# The shape of each rank's tensor. Sizes are even, because some releases support only even sizes for small dtypes.
_SHAPE = (4, 64)


def check_collectives(subject: Subject) -> str:
    """Check that collectives in graphs return the expected results."""
    group = subject.group
    if group is None or group.world_size == 1:
        raise NotChecked("there is one rank")
    size, sent = group.world_size, _rank_numbers(group.rank_in_group).to(subject.dtype)
    every = [_rank_numbers(rank) for rank in range(size)]

    def self_test_all_reduce(x: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(x.clone())  # some devices reduce in place

    def self_test_all_gather(x: torch.Tensor) -> torch.Tensor:
        return group.all_gather(x, dim=-1)

    collectives: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "all_reduce": (self_test_all_reduce, torch.stack(every).sum(0)),
        "all_gather": (self_test_all_gather, torch.cat(every, dim=-1)),
    }
    memory = subject.backend.memory
    for name, (run, expected) in collectives.items():
        found = memory.download(subject.backend.graphs.graph(run)(memory.upload(sent))).float()
        if found.shape != expected.shape or not torch.equal(found, expected):
            raise Failed(f"{name} of {size} ranks in a captured graph returned wrong numbers")
    return f"{' and '.join(collectives)} of {size} ranks"


def _rank_numbers(rank: int) -> torch.Tensor:
    """Return float32 values that differ from those of neighboring ranks. Sums over 100 ranks are exact in bfloat16."""
    return (torch.arange(_SHAPE[0] * _SHAPE[1]).view(_SHAPE) % 2 + rank % 2).float()
