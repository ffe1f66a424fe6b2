"""The parts of `torch.hpu` that every accelerator's module has. All of its operations are synchronous."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from card_emulator.card import DEVICE


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None: ...

    @property
    def device(self) -> torch.device:
        return DEVICE.where

    def synchronize(self) -> None:
        synchronize()

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        DEVICE.mark_step()
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        DEVICE.refuse_in_capture("the program waits for an event")
        DEVICE.counters.step.syncs += 1
        DEVICE.counters.event("sync", "Event.synchronize")

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed) or self._at is None or end._at is None:
            raise RuntimeError("both events must be recorded and must have been created with enable_timing=True")
        return (end._at - self._at) * 1e3


class Streams:
    """A stack of streams. The last one is the current stream."""

    def __init__(self, kind: type[Stream]) -> None:
        self._default = kind()
        self._current = [self._default]

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[-1]

    def default_stream(self, device: Any = None) -> Stream:
        return self._default

    @contextmanager
    def stream(self, chosen: Stream | None) -> Iterator[None]:
        self._current.append(chosen or self._current[-1])
        try:
            yield
        finally:
            self._current.pop()

    def set_stream(self, chosen: Stream) -> None:
        self._current[-1] = chosen

    def contents(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("current_stream", "default_stream", "stream", "set_stream")}


def synchronize(device: Any = None) -> None:
    """Launch the pending operations and wait for the device."""
    name = f"torch.{DEVICE.where.type}.synchronize"
    DEVICE.refuse_in_capture(f"{name} waits for the device")
    DEVICE.counters.step.syncs += 1
    DEVICE.counters.event("sync", name)
    DEVICE.implicit_marker(name)
    for host, values in DEVICE.late:
        host.copy_(values)
    DEVICE.late.clear()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(DEVICE.pid)


def init() -> None:
    DEVICE.opened()


def device_count() -> int:
    return DEVICE.model.count


def current_device() -> int:
    return DEVICE.where.index


def get_device_name(device: Any = None) -> str:
    return DEVICE.generation.upper()


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    DEVICE.choose(DEVICE.where.index if index is None else index)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return DEVICE.mem_get_info()


def memory_allocated(device: Any = None) -> int:
    return DEVICE.in_use + DEVICE.graph_bytes


def memory_reserved(device: Any = None) -> int:
    return DEVICE.memory_limit


def max_memory_allocated(device: Any = None) -> int:
    return DEVICE.peak + DEVICE.graph_bytes


def reset_peak_memory_stats(device: Any = None) -> None:
    DEVICE.peak = DEVICE.in_use


def empty_cache() -> None: ...


def manual_seed(seed: int) -> None:
    DEVICE.generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return DEVICE.generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    DEVICE.generator.set_state(state)


def no_bad_fork() -> bool:
    return DEVICE.blocked is not None


# The attributes that the torch module of every card has.
COMMON: dict[str, Any] = {
    "_lazy_init": init,
    "manual_seed_all": manual_seed,
    "_is_in_bad_fork": no_bad_fork,
    **{
        function.__name__: function
        for function in (
            synchronize,
            is_available,
            is_initialized,
            init,
            device_count,
            current_device,
            get_device_name,
            set_device,
            mem_get_info,
            memory_allocated,
            memory_reserved,
            max_memory_allocated,
            reset_peak_memory_stats,
            empty_cache,
            manual_seed,
            get_rng_state,
            set_rng_state,
        )
    },
}


def make_module(contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(f"torch.{DEVICE.where.type}")
    vars(module).update(COMMON, **contents)
    return module
