"""The module `torch.hpu`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vllm_gaudi_spec.emulator import runtime
from vllm_gaudi_spec.emulator.card import DEVICE
from vllm_gaudi_spec.emulator.gaudi import graphs


def memory_stats(device: Any = None) -> dict[str, int]:
    in_use, peak = runtime.memory_allocated(), runtime.max_memory_allocated()
    return {"Limit": DEVICE.memory_limit, "InUse": in_use, "MaxInUse": peak}


def make_module() -> ModuleType:
    contents: dict[str, Any] = {
        "Stream": runtime.Stream,
        "Event": runtime.Event,
        "memory_stats": memory_stats,
        **runtime.Streams(runtime.Stream).contents(),
    }
    if DEVICE.lazy:
        # Graphs exist in lazy mode only; elsewhere the attribute is missing, as on the device.
        contents["HPUGraph"] = graphs.HPUGraph
        contents["wrap_in_hpu_graph"] = graphs.wrap_in_hpu_graph
    return runtime.make_module(contents)
