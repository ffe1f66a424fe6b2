"""Streams and events of the NPU. Work is done when a call returns; what is kept is who waited for whom, so that what
would race on a card is refused here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_gaudi_spec.emulator import runtime
from vllm_gaudi_spec.emulator.card import DEVICE, DeviceRefusal
from vllm_gaudi_spec.emulator.queue import Queue
from vllm_gaudi_spec.emulator.source import here

# How much of each stream's work somebody waited for, by the stream's number.
Clock = dict[int, int]
# A piece of work: its stream's number, and its place there.
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
        self.known: Clock = {}

    def issue(self) -> Work:
        """Work that somebody may have to wait for."""
        time = self.known.get(self.number, 0) + 1
        self.known[self.number] = _issued[self.number] = time
        return self.number, time

    def follows(self, work: Work) -> bool:
        """Whether what is issued here now comes after that work."""
        number, time = work
        return max(self.known.get(number, 0), _known_to_host.get(number, 0)) >= time

    def wait_stream(self, other: runtime.Stream) -> None:
        assert isinstance(other, Stream)
        _merge(self.known, other.known)

    def wait_event(self, event: runtime.Event) -> None:
        event.wait(self)

    def record_event(self, event: runtime.Event | None = None) -> runtime.Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        super().synchronize()
        _merge(_known_to_host, self.known)


class Event(runtime.Event):
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        super().__init__(enable_timing, blocking, interprocess)
        self._known: Clock = {}

    def record(self, stream: runtime.Stream | None = None) -> None:
        stream = stream or STREAMS.current_stream()
        assert isinstance(stream, Stream)
        super().record(stream)
        self._known = dict(stream.known)

    def wait(self, stream: runtime.Stream | None = None) -> None:
        stream = stream or STREAMS.current_stream()
        assert isinstance(stream, Stream)
        _merge(stream.known, self._known)

    def synchronize(self) -> None:
        super().synchronize()
        _merge(_known_to_host, self._known)


class ExternalEvent:
    """A flag that a graph waits for and takes down, and that somebody outside raises."""

    def __init__(self) -> None:
        self._raised = False
        self._known: Clock = {}
        self._taken: Work | None = None
        """The replay that took it down last."""

    def record(self, stream: Stream | None = None) -> None:
        DEVICE.refuse_in_capture("an ExternalEvent is recorded")
        stream = stream or current_stream()
        if self._taken is not None and not stream.follows(self._taken):
            raise DeviceRefusal(
                f"an ExternalEvent is recorded at {here()}, on a stream that did not wait for the replay that took it "
                "last: that replay might take it a second time, and the next one wait for ever"
            )
        self._raised = True
        self._known = dict(stream.known)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if not self._put_in_graph(stream, self._pass):
            self._pass(stream)

    def reset(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if not self._put_in_graph(stream, self._take):
            self._take(stream)

    def _put_in_graph(self, stream: Stream, run: Any) -> bool:
        capture = DEVICE.capture
        if capture is None:
            return False
        capture.record_event(stream, run)
        return True

    def _pass(self, stream: Stream) -> None:
        if not self._raised:
            raise DeviceRefusal(
                "a stream waits for an ExternalEvent that nobody recorded since it was reset: here work is done when "
                "a call returns, so it has to be recorded before"
            )
        _merge(stream.known, self._known)

    def _take(self, stream: Stream) -> None:
        self._raised = False
        self._taken = (stream.number, stream.known.get(stream.number, 0))


class NpuStreams(runtime.Streams):
    @contextmanager
    def stream(self, chosen: runtime.Stream | None) -> Iterator[None]:
        if chosen is not None and chosen is not self.current_stream():
            DEVICE.refuse_in_capture("work moves to another stream, which is not emulated")
        with super().stream(chosen):
            yield


class NpuQueue(Queue):
    def waited(self) -> None:
        _merge(_known_to_host, current_stream().known)


STREAMS = NpuStreams(Stream)


def current_stream() -> Stream:
    stream = STREAMS.current_stream()
    assert isinstance(stream, Stream)
    return stream


def synchronize(device: Any = None) -> None:
    runtime.synchronize(device)
    _merge(_known_to_host, _issued)
