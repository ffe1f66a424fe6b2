"""Streams and events of the NPU. Work is done when a call returns; what is kept is who waited for whom, so that what
would race on a card is refused here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_gaudi_spec.emulator import runtime
from vllm_gaudi_spec.emulator.card import DEVICE
from vllm_gaudi_spec.emulator.queue import Queue

# How much of each stream's work somebody waited for, by the stream's number.
Clock = dict[int, int]
# A piece of work: its stream's number, and its time there.
Work = tuple[int, int]

_numbers = itertools.count()
_issued: Clock = {}
_known_to_host: Clock = {}


def _merge(into: Clock, other: Clock) -> None:
    for number, time in other.items():
        if into.get(number, 0) < time:
            into[number] = time


class Stream(runtime.Stream):
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__(device, priority)
        self.number = next(_numbers)
        self.clock: Clock = {}

    def issue(self) -> Work:
        """Work that somebody may have to wait for."""
        time = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = _issued[self.number] = time
        return self.number, time

    def follows(self, work: Work) -> bool:
        """Whether what is issued here now comes after that work."""
        number, time = work
        return max(self.clock.get(number, 0), _known_to_host.get(number, 0)) >= time

    def wait_stream(self, other: runtime.Stream) -> None:
        assert isinstance(other, Stream)
        _merge(self.clock, other.clock)

    def wait_event(self, event: runtime.Event) -> None:
        event.wait(self)

    def record_event(self, event: runtime.Event | None = None) -> runtime.Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        super().synchronize()
        _merge(_known_to_host, self.clock)


class Event(runtime.Event):
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        super().__init__(enable_timing, blocking, interprocess)
        self._clock: Clock = {}

    def record(self, stream: runtime.Stream | None = None) -> None:
        stream = stream or STREAMS.current_stream()
        assert isinstance(stream, Stream)
        super().record(stream)
        self._clock = dict(stream.clock)

    def wait(self, stream: runtime.Stream | None = None) -> None:
        stream = stream or STREAMS.current_stream()
        assert isinstance(stream, Stream)
        _merge(stream.clock, self._clock)

    def synchronize(self) -> None:
        super().synchronize()
        _merge(_known_to_host, self._clock)


class NpuStreams(runtime.Streams):
    @contextmanager
    def stream(self, chosen: runtime.Stream | None) -> Iterator[None]:
        if chosen is not None and chosen is not self.current_stream():
            DEVICE.refuse_in_capture("work moves to another stream, which is not emulated")
        with super().stream(chosen):
            yield


class NpuQueue(Queue):
    def waited(self) -> None:
        _merge(_known_to_host, current_stream().clock)


STREAMS = NpuStreams(Stream)


def current_stream() -> Stream:
    stream = STREAMS.current_stream()
    assert isinstance(stream, Stream)
    return stream


def synchronize(device: Any = None) -> None:
    runtime.synchronize(device)
    _merge(_known_to_host, _issued)
