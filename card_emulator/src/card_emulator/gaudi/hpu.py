"""The `torch.hpu` module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from card_emulator import runtime
from card_emulator.card import DEVICE
from card_emulator.gaudi import graphs


def memory_stats(device: Any = None) -> dict[str, int]:
    in_use, peak = runtime.memory_allocated(), runtime.max_memory_allocated()
    return {"Limit": DEVICE.memory_limit, "InUse": in_use, "MaxInUse": peak}


class Streams(runtime.Streams):
    """Streams that cannot be switched during a capture. On a real card, a capture that begins on one stream and ends on
    another terminates the process (bridge 1.19, HPUGraph.cpp)."""

    @contextmanager
    def stream(self, chosen: runtime.Stream | None) -> Iterator[None]:
        DEVICE.refuse_in_capture("another stream is chosen")
        with super().stream(chosen):
            yield

    def set_stream(self, chosen: runtime.Stream) -> None:
        DEVICE.refuse_in_capture("another stream is chosen")
        super().set_stream(chosen)


def get_device_properties(device: Any = None) -> NoReturn:
    """Raise an error, because a real card's result is unknown. It lacks CUDA's fields, and vllm-gaudi therefore
    replaces this function (platform.py)."""
    raise NotImplementedError("the result of torch.hpu.get_device_properties is unknown; use torch.hpu.mem_get_info")


def get_device_name(device: Any = None) -> str:
    """Return the card's name. If the runtime prints its log to the console, the name follows a log line, as on a real
    card (vllm-gaudi#963)."""
    name = DEVICE.generation.upper()
    return f"[device] opened\n{name}" if DEVICE.hostile and DEVICE.console else name


class device:
    """The context manager `torch.hpu.device`. It does not restore the previous device, because a process uses only
    one."""

    def __init__(self, device: Any) -> None:
        runtime.set_device(device)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


def _submodule(name: str, contents: dict[str, Any]) -> ModuleType:
    module = sys.modules[f"torch.hpu.{name}"] = ModuleType(f"torch.hpu.{name}")
    vars(module).update(contents)
    return module


def make_module() -> ModuleType:
    random = ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state")
    contents: dict[str, Any] = {
        "Stream": runtime.Stream,
        "Event": runtime.Event,
        "memory_stats": memory_stats,
        "get_device_properties": get_device_properties,
        "get_device_name": get_device_name,
        "device": device,
        "random": _submodule("random", {name: runtime.COMMON[name] for name in random}),
        "graphs": _submodule("graphs", {"input_hash": graphs.input_hash}),
        **Streams(runtime.Stream).contents(),
    }
    if DEVICE.lazy:
        # These attributes exist only in lazy mode, as on a real card.
        contents["HPUGraph"] = graphs.HPUGraph
        contents["wrap_in_hpu_graph"] = graphs.wrap_in_hpu_graph
    module = runtime.make_module(contents)
    module.__path__ = []  # marks the module as a package
    return module
