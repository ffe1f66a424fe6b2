"""The first collectives of groups of ranks: what is compared, and the errors."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state

from tests.support.fakes import CopyingMemory
from vllm_gaudi_spec.devices.common.group_check import _make_numbers, check_group, check_groups

Collective = Callable[[torch.Tensor], torch.Tensor]


class Group:
    """Rank 1 of two, whose other rank sends what it should."""

    ranks = (4, 6)
    world_size = 2
    rank_in_group = 1

    def __init__(self, name: str = "tp:0", communicator: Any = True) -> None:
        self.unique_name, self.device_communicator = name, communicator
        self.device_group = "made"
        self.done: list[str] = []
        self.spoil: dict[str, Collective] = {}

    def all_gather(self, sent: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        return self._finish("all_gather", torch.cat([_make_numbers(0), sent]))

    def all_reduce(self, sent: torch.Tensor) -> torch.Tensor:
        return self._finish("all_reduce", sent.add_(_make_numbers(0)))  # in place, as on a Gaudi

    is_first_rank, is_last_rank = False, True

    def recv(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self._finish("recv", _make_numbers(0).reshape(size).to(dtype))

    def _finish(self, name: str, result: torch.Tensor) -> torch.Tensor:
        self.done.append(name)
        return self.spoil.get(name, torch.clone)(result)


def test_n01_both_collectives_run_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [Group("tp:0"), Group("ep:0"), Group("world:0", communicator=None), Group("pp:0"), Group("tp:1")]
    groups[3].world_size = 1
    del groups[4].device_group  # destroyed, but still referred to
    registered = {group.unique_name: weakref.ref(group) for group in groups}
    registered["old:0"] = weakref.ref(Group())  # no longer alive
    monkeypatch.setattr("vllm_gaudi_spec.devices.common.group_check.groups", registered)
    check_groups(CopyingMemory())
    assert [group.done for group in groups] == [["all_gather", "all_reduce"]] * 2 + [[], [], []]


def test_upstream_still_takes_its_group_from_a_coordinator_that_is_destroyed() -> None:
    coordinator: Any = SimpleNamespace(
        device_group=None, cpu_group=None, device_communicator=None, mq_broadcaster=None, world_size=2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", lambda group: None)
        parallel_state.GroupCoordinator.destroy(coordinator)
    assert not hasattr(coordinator, "device_group")


def test_upstream_still_registers_its_groups_there() -> None:
    group = Group("ours:0")
    parallel_state._register_group(group)
    assert parallel_state._groups.pop("ours:0")() is group


def _wrong_at_3(result: torch.Tensor) -> torch.Tensor:
    result[3] += 1
    return result


def _fails(result: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no route to rank 4")


@pytest.mark.parametrize(
    ("collective", "spoil", "words"),
    [
        ("all_gather", _wrong_at_3, "returned 4 instead of 3"),
        ("all_reduce", _wrong_at_3, "returned 15 instead of 14"),
        ("all_gather", lambda result: result[:128], r"returned a tensor of shape \(128,\)"),
        ("all_reduce", _fails, "failed: no route to rank 4"),
        ("recv", _wrong_at_3, "returned 4 instead of 3"),
    ],
)
def test_error_names_the_collective_group_and_ranks(collective: str, spoil: Collective, words: str) -> None:
    group = Group("pp:0")
    group.spoil = {collective: spoil}
    with pytest.raises(RuntimeError, match=rf"{collective} of group pp:0 \(ranks 4, 6\) {words}; check the network"):
        check_group(group, CopyingMemory())
