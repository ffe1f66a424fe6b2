"""What the emulated CANN refuses, asked by its C functions: torch_npu keeps a capture that failed."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vllm_gaudi_spec.emulator.ascend.cann.build import LIBRARY

THREAD_LOCAL, RELAXED = 1, 2  # modes of a capture
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
MIB = 1 << 20


class Acl:
    """Calls by name, whose errors are of the class below."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.room = self.made("aclrtMalloc", ctypes.c_size_t(64), 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise Refused(status, self._library.aclGetRecentErrMsg().decode())

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self(name, ctypes.byref(found), *arguments)
        return found

    def stream(self) -> ctypes.c_void_p:
        return self.made("aclrtCreateStream")

    def event(self) -> ctypes.c_void_p:
        return self.made("aclrtCreateEventWithFlag", 0)

    def fill(self, stream: ctypes.c_void_p, value: int = 0) -> None:
        """One operation."""
        size = ctypes.c_size_t(64)
        self("aclrtMemsetAsync", self.room, size, value, size, stream)

    def begin(self, mode: int = RELAXED) -> ctypes.c_void_p:
        """A stream that is captured."""
        stream = self.stream()
        self("aclmdlRICaptureBegin", stream, mode)
        return stream

    def end(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        graph = ctypes.c_void_p()
        self("aclmdlRICaptureEnd", stream, ctypes.byref(graph))
        return graph

    def wait(self, waiting: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        event = self.event()
        self("aclrtRecordEvent", event, stream)
        self("aclrtStreamWaitEvent", waiting, event)

    def group(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """A graph, and its group of one operation."""
        stream, group = self.begin(), ctypes.c_void_p()
        self("aclmdlRICaptureTaskGrpBegin", stream)
        self.fill(stream)
        self("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
        return self.end(stream), group


class Refused(Exception):
    pass


@pytest.fixture
def acl(npu: Any) -> Acl:
    return Acl()


def open_group(acl: Acl) -> None:
    stream = acl.begin()
    acl("aclmdlRICaptureTaskGrpBegin", stream)
    acl.end(stream)


def group_in_a_group(acl: Acl) -> None:
    stream = acl.begin()
    acl("aclmdlRICaptureTaskGrpBegin", stream)
    try:
        acl("aclmdlRICaptureTaskGrpBegin", stream)
    finally:
        acl("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(ctypes.c_void_p()))
        acl.end(stream)


def update_of_other_tasks(acl: Acl) -> None:
    _, group = acl.group()
    stream = acl.stream()
    acl("aclmdlRICaptureTaskUpdateBegin", stream, group)
    acl("aclmdlRICaptureTaskUpdateEnd", stream)


def update_of_a_group_that_is_gone(acl: Acl) -> None:
    graph, group = acl.group()
    acl("aclmdlRIDestroy", graph)
    acl("aclmdlRICaptureTaskUpdateBegin", acl.stream(), group)


def no_join(acl: Acl) -> None:
    stream, side = acl.begin(), acl.stream()
    acl.wait(side, stream)
    acl.fill(side)
    acl.end(stream)


def join_before_the_last_operation(acl: Acl) -> None:
    stream, side, event = acl.begin(), acl.stream(), acl.event()
    acl.wait(side, stream)
    acl("aclrtRecordEvent", event, side)
    acl.fill(side)
    acl("aclrtStreamWaitEvent", stream, event)
    acl.end(stream)


def join_to_a_stream_that_is_not_joined(acl: Acl) -> None:
    stream, first, second = acl.begin(), acl.stream(), acl.stream()
    acl.wait(first, stream)
    acl.fill(first)
    acl.wait(second, first)
    acl.end(stream)


def event_of_another_capture(acl: Acl) -> None:
    stream, other = acl.begin(), acl.begin()
    try:
        acl.wait(other, stream)
    finally:
        acl.end(stream)
        acl.end(other)


def destroying_in_a_capture(acl: Acl) -> None:
    graph = acl.end(acl.begin())
    stream = acl.begin(THREAD_LOCAL)
    try:
        acl("aclmdlRIDestroy", graph)
    finally:
        acl.end(stream)


def graph_that_is_gone(acl: Acl) -> None:
    graph = acl.end(acl.begin())
    acl("aclmdlRIDestroy", graph)
    acl("aclmdlRIGetId", graph, ctypes.byref(ctypes.c_uint32()))


REFUSED: dict[str, tuple[Callable[[Acl], Any], str]] = {
    "a task group that is open": (open_group, "a task group was not ended"),
    "a task group in another": (group_in_a_group, "a task group in another"),
    "an update of other tasks": (update_of_other_tasks, "a task update is not of the tasks of its group"),
    "an update of a group that is gone": (update_of_a_group_that_is_gone, "a task update of a group that is gone"),
    "a stream that is not joined": (no_join, "a stream was not joined again"),
    "a join that comes too early": (join_before_the_last_operation, "a stream was not joined again"),
    "a join to what is not joined": (join_to_a_stream_that_is_not_joined, "a stream was not joined again"),
    "an event of another capture": (event_of_another_capture, "the event is of another capture"),
    "destroying a graph in a capture": (destroying_in_a_capture, "aclmdlRIDestroy while a stream is captured"),
    "the id of a graph that is gone": (graph_that_is_gone, "aclmdlRIGetId of a graph that is gone"),
    "the default stream": (lambda acl: acl("aclmdlRICaptureBegin", None, RELAXED), "on the default stream"),
    "more memory than there is": (lambda acl: acl.made("aclrtMalloc", ctypes.c_size_t(61 << 30), 0), "no memory for"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, acl: Acl) -> None:
    run, words = REFUSED[case]
    with pytest.raises(Refused, match=words):
        run(acl)


def test_a_stream_that_is_joined(acl: Acl) -> None:
    stream, first, second = acl.begin(), acl.stream(), acl.stream()
    acl.wait(first, stream)
    acl.fill(first)
    acl.wait(second, first)
    acl.fill(second)
    acl.wait(stream, second)
    acl("aclmdlRIDestroy", acl.end(stream))


def test_a_copy_of_memory_that_is_not_page_locked_is_done_when_it_returns(acl: Acl) -> None:
    stream, host, size = acl.stream(), ctypes.create_string_buffer(b"first", 8), ctypes.c_size_t(8)
    acl("aclrtMemcpyAsync", acl.room, size, host, size, HOST_TO_DEVICE, stream)
    host.value = b"later"
    found = ctypes.create_string_buffer(8)
    acl("aclrtMemcpy", found, size, acl.room, size, DEVICE_TO_HOST)
    assert found.value == b"first"


def test_an_event_that_is_recorded_again_while_somebody_waits(acl: Acl) -> None:
    """For what it was when the wait began: nothing of the other stream ever runs."""
    stream, other, event, size = acl.stream(), acl.stream(), acl.event(), ctypes.c_size_t(64 * MIB)
    large = acl.made("aclrtMalloc", size, 0)
    for _ in range(20):
        acl("aclrtMemsetAsync", large, size, 0, size, stream)
    acl("aclrtRecordEvent", event, stream)
    waiting = threading.Thread(target=acl, args=("aclrtSynchronizeEvent", event), daemon=True)
    waiting.start()
    time.sleep(0.05)
    acl("aclrtRecordEvent", event, other)
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    acl("aclrtFree", large)
