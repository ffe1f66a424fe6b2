"""What adapters add to a layer's output, against one loop over tokens; which slot a row has when."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.model_manager import AdapterLRUCache
from vllm.lora.request import LoRARequest

from tests.support.fakes import CapturingBackend, HostBackend, step
from vllm_gaudi_spec.lora.application import NO_SLOT, LinearAdapters, TokenSlots
from vllm_gaudi_spec.lora.manager import AdapterLoader, SlottedAdapters
from vllm_gaudi_spec.runner.extensions.adapters import Adapters

SLOTS, RANK, INPUTS, OUTPUTS = 3, 4, 10, (6, 2, 2)
TOKENS = torch.tensor([0, NO_SLOT, 2, 1, 1, 0], dtype=torch.int32)


def slots() -> TokenSlots:
    config: Any = SimpleNamespace(max_loras=SLOTS, max_lora_rank=RANK)
    return TokenSlots(64, 8, device=torch.device("cpu"), lora_config=config)


def linear(outputs: tuple[int, ...] = OUTPUTS, one: bool = False) -> Any:
    """What vLLM's wrappers have when they are new."""
    first = tuple(torch.zeros(SLOTS, 1, RANK, INPUTS) for _ in outputs)
    second = tuple(torch.zeros(SLOTS, 1, size, RANK) for size in outputs)
    return SimpleNamespace(lora_a_stacked=first[0] if one else first, lora_b_stacked=second[0] if one else second)


def fill(module: Any) -> None:
    """As vLLM does, slot by slot; the last one with a smaller rank."""
    generator = torch.Generator().manual_seed(0)
    for slot in range(SLOTS):
        rank = RANK if slot < SLOTS - 1 else RANK - 2
        for first, second in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True):
            first[slot, 0, :rank].copy_(torch.randn(rank, INPUTS, generator=generator))
            second[slot, 0, :, :rank].copy_(torch.randn(second.shape[2], rank, generator=generator))


def expected(module: Any, x_TI: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
    rows = []
    for x_I, y_O, slot in zip(x_TI, y_TO, TOKENS.tolist(), strict=True):
        if slot != NO_SLOT:
            pairs = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
            y_O = y_O + torch.cat([second[slot, 0] @ (first[slot, 0] @ x_I) for first, second in pairs])
        rows.append(y_O)
    return torch.stack(rows)


def test_non_finite_slot_does_not_affect_other_tokens() -> None:
    """Of the first matrices: what is wrong with second ones is found while they are loaded."""
    module, token_slots = linear(), slots()
    layer = LinearAdapters(module, token_slots, HostBackend().memory.upload)
    x_TI, y_TO = torch.randn(len(TOKENS), INPUTS), torch.randn(len(TOKENS), sum(OUTPUTS))
    fill(module)
    wanted = expected(module, x_TI, y_TO)
    module.lora_a_stacked[1][1] = torch.nan
    layer.send()
    with token_slots.applied(TOKENS):
        ours = layer.add_lora_linear(y_TO, x_TI)
    others = TOKENS != 1
    torch.testing.assert_close(ours[others], wanted[others])
    assert ours[~others].isnan().any()


def test_ranks_add_the_same_bits_to_logits() -> None:
    """Logits are gathered, and states are each rank's own: nobody promises that they are the same bits."""
    sent: list[torch.Tensor] = []

    def broadcast(columns: torch.Tensor) -> torch.Tensor:
        sent.append(columns)
        return sent[0]

    group: Any = SimpleNamespace(device_communicator=SimpleNamespace(broadcast=broadcast))
    module, token_slots = linear((12,), one=True), slots()
    layer = LinearAdapters(module, token_slots, HostBackend().memory.upload, group)
    fill(SimpleNamespace(lora_a_stacked=(module.lora_a_stacked,), lora_b_stacked=(module.lora_b_stacked,)))
    layer.send()
    x_TI, y_TV = torch.randn(len(TOKENS), INPUTS), torch.randn(len(TOKENS), 12)
    with token_slots.applied(TOKENS):
        first, second = (layer.add_lora_logits(y_TV, states) for states in (x_TI, x_TI * (1 + 1e-6)))
    assert torch.equal(first, second)
    assert not torch.equal(sent[0], sent[1])
    assert sent[0].shape == (len(TOKENS), SLOTS * RANK)


class Loader:
    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.wanted: list[list[int]] = []
        self.loaded: list[int] = []

    def add_adapter(self, wanted: LoRARequest) -> None:
        self.loaded.append(wanted.lora_int_id)

    def load_into_slots(self, wanted: Iterable[LoRARequest]) -> dict[int, int]:
        self.wanted.append([request.lora_int_id for request in wanted])
        return self.slots


def rows_of(backend: HostBackend) -> tuple[Any, list[torch.Tensor]]:
    """Without a model; and what is sent to the device."""
    adapters: Any = Adapters.__new__(Adapters)
    adapters._backend, adapters.loader, sent = backend, Loader(), []
    adapters._slots_np = np.full(4, NO_SLOT, dtype=np.int32)
    adapters._slots_R = torch.full((4,), NO_SLOT, dtype=torch.int32)

    def put(slots_R: torch.Tensor) -> None:
        sent.append(slots_R)
        adapters._put_slots(slots_R)

    adapters._put = put
    return adapters, sent


def test_rows_keep_their_adapters_slots() -> None:
    adapters, sent = rows_of(CapturingBackend())
    named = {name: LoRARequest(name, number, "folder") for number, name in ((5, "x"), (6, "y"))}
    members = [("p", 2, "x"), ("q", 0, None), ("r", 1, "y")]
    by_id = {name: SimpleNamespace(row=row, lora=lora and named[lora]) for name, row, lora in members}
    requests: Any = SimpleNamespace(by_id=by_id, freed_rows=[], admitted=[])
    rows = torch.tensor([2, 0, 3])

    adapters.apply(step({"q": 1}), requests)
    assert not sent
    assert adapters.loader.wanted == []
    adapters.loader.slots = {5: 1, 6: 0}
    adapters.apply(step({"p": 1, "q": 1, "r": 3}), requests)
    assert adapters.loader.wanted == [[5, 6]]
    assert adapters.gather_slots(rows, 2).tolist() == [1, 1, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT]
    adapters.apply(step({"p": 1, "r": 1}), requests)
    assert len(sent) == 1, "nothing has changed"
    adapters.loader.slots = {5: 0}  # another one took its slot in between
    adapters.apply(step({"p": 1}), requests)
    assert adapters.gather_slots(rows).tolist() == [0, NO_SLOT, NO_SLOT]
    by_id["p"].lora = None  # the row's next request
    adapters.apply(step({"p": 1}), requests)
    assert adapters.gather_slots(rows).tolist() == [NO_SLOT] * 3


def test_request_can_reload_its_adapter() -> None:
    adapters, _ = rows_of(CapturingBackend())
    own = SimpleNamespace(row=2, lora=LoRARequest("x", 5, "folder", load_inplace=True))
    requests: Any = SimpleNamespace(by_id={"p": own}, freed_rows=[], admitted=[own, own])
    adapters.loader.slots = {5: 1}
    adapters.apply(step({"p": 1}), requests)
    requests.admitted = []
    adapters.apply(step({"p": 1}), requests)
    assert adapters.loader.loaded == [5], "once, and not at each step"


@pytest.mark.parametrize("max_cpu_loras", [2, 3])
def test_step_that_needs_all_slots_unpins_an_adapter(max_cpu_loras: int) -> None:
    """The scheduler, which does not know what is pinned, put so many adapters in the step."""
    # A model without modules, for which each adapter loads.
    max_loras, manager = 2, object.__new__(SlottedAdapters)
    manager.lora_config = SimpleNamespace(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    manager.modules, manager.lora_index_to_id = {}, [None] * max_loras
    manager._registered_adapters = AdapterLRUCache(max_cpu_loras, manager.deactivate_adapter)
    manager._active_adapters = AdapterLRUCache(max_loras, manager._deactivate_adapter)
    manager._add_adapter = lambda lora: manager._registered_adapters.put(lora.id, lora)
    loader: Any = object.__new__(AdapterLoader)
    loader._adapter_manager = manager
    loader._load_adapter = lambda request: SimpleNamespace(id=request.lora_int_id)
    pinned, *others = (LoRARequest(name, number, name) for number, name in enumerate("abc", start=1))
    loader.add_adapter(pinned)
    assert loader.pin_adapter(1)
    for other in others:
        assert loader.load_into_slots([other]).keys() == {1, other.lora_int_id}, "it stays while there is room"
    assert loader.load_into_slots(others).keys() == {2, 3}
    assert loader.load_into_slots([pinned]).keys() >= {1}


@pytest.mark.parametrize(("backend", "skips"), [(HostBackend(), True), (CapturingBackend(), False)])
def test_no_slots_are_gathered_without_adapters(backend: HostBackend, skips: bool) -> None:
    adapters, sent = rows_of(backend)
    own = SimpleNamespace(row=2, lora=LoRARequest("x", 5, "folder"))
    by_id = {"p": own, "q": SimpleNamespace(row=0, lora=None)}
    requests: Any = SimpleNamespace(by_id=by_id, freed_rows=[], admitted=[])
    adapters.loader.slots = {5: 1}
    row = torch.tensor([0])
    assert (adapters.gather_slots(row) is None) == skips
    adapters.apply(step({"p": 1, "q": 1}), requests)
    assert adapters.gather_slots(row).tolist() == [NO_SLOT]
    adapters.apply(step({"q": 1}), requests)
    assert adapters.gather_slots(row) is not None, "it waits, and may be in the next step"
    requests.freed_rows = [2]
    adapters.apply(step({"q": 1}), requests)
    assert (adapters.gather_slots(row) is None) == skips
    assert len(sent) == 2
    assert sent[-1].tolist() == [NO_SLOT] * 4
