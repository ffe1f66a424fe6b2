"""What the emulated CANN refuses, asked by its C functions: torch_npu keeps a capture that failed.

Each program passes once what refuses it is switched off: nothing else stops it, so it is this refusal that is tested.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from card_emulator.ascend.cann.build import LIBRARY

THREAD_LOCAL, RELAXED = 1, 2  # modes of a capture
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
HCCL_FLOAT32, HCCL_INT64, HCCL_SUM = 4, 5, 0


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

    @contextmanager
    def allowing(self, words: str) -> Iterator[None]:
        """Without the refusals that have these words."""
        self._library.emulated_cann_allow(words.encode())
        try:
            yield
        finally:
            self._library.emulated_cann_allow(b"")

    @contextmanager
    def without_computing(self) -> Iterator[None]:
        self._library.emulated_cann_compute(ctypes.c_bool(False))
        try:
            yield
        finally:
            self._library.emulated_cann_compute(ctypes.c_bool(True))

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self(name, ctypes.byref(found), *arguments)
        return found

    def stream(self) -> ctypes.c_void_p:
        return self.made("aclrtCreateStream")

    def event(self) -> ctypes.c_void_p:
        return self.made("aclrtCreateEventWithFlag", 0)

    def fill(self, stream: ctypes.c_void_p, value: int = 0) -> None:
        size = ctypes.c_size_t(64)
        self("aclrtMemsetAsync", self.room, size, value, size, stream)

    def poll(self, event: ctypes.c_void_p) -> None:
        status = ctypes.c_int(0)
        while not status.value:
            self("aclrtQueryEventStatus", event, ctypes.byref(status))
            time.sleep(0.001)

    def begin(self, mode: int = RELAXED) -> ctypes.c_void_p:
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

    @contextmanager
    def capturing(self, mode: int = RELAXED) -> Iterator[ctypes.c_void_p]:
        stream = self.begin(mode)
        try:
            yield stream
        finally:
            with suppress(Refused):  # where the program was refused, the capture ends as it may
                self("aclmdlRICaptureEnd", stream, ctypes.byref(ctypes.c_void_p()))

    def ranks(self) -> ctypes.c_void_p:
        root, found = ctypes.create_string_buffer(4108), ctypes.c_void_p()
        self("HcclGetRootInfo", root)
        self("HcclCommInitRootInfo", 1, root, 0, ctypes.byref(found))
        return found

    def all_reduce(self, stream: ctypes.c_void_p, dtype: int = HCCL_FLOAT32) -> None:
        self("HcclAllReduce", self.room, self.room, ctypes.c_uint64(8), dtype, HCCL_SUM, self.ranks(), stream)

    def update(self, stream: ctypes.c_void_p, group: ctypes.c_void_p) -> None:
        self("aclmdlRICaptureTaskUpdateBegin", stream, group)
        try:
            self.fill(stream)
        finally:
            self("aclmdlRICaptureTaskUpdateEnd", stream)

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
    with acl.capturing() as stream:
        acl("aclmdlRICaptureTaskGrpBegin", stream)
        acl.end(stream)


def update_of_other_tasks(acl: Acl) -> None:
    _, group = acl.group()
    stream = acl.stream()
    acl("aclmdlRICaptureTaskUpdateBegin", stream, group)
    acl("aclmdlRICaptureTaskUpdateEnd", stream)


def update_on_a_captured_stream(acl: Acl) -> None:
    _, group = acl.group()
    with acl.capturing() as stream:
        acl("aclmdlRICaptureTaskUpdateBegin", stream, group)


def update_beside_a_run(acl: Acl) -> None:
    graph, group = acl.group()
    acl("aclmdlRIExecuteAsync", graph, acl.stream())
    acl.update(acl.stream(), group)


def run_beside_an_update(acl: Acl) -> None:
    graph, group = acl.group()
    acl.update(acl.stream(), group)
    acl("aclmdlRIExecuteAsync", graph, acl.stream())


def run_without_memory(acl: Acl) -> None:
    size = ctypes.c_size_t(64)
    memory = acl.made("aclrtMalloc", size, 0)
    with acl.without_computing():  # what the graph runs would end the process
        stream = acl.begin()
        acl("aclrtMemsetAsync", memory, size, 0, size, stream)
        graph = acl.end(stream)
    acl("aclrtFree", memory)
    acl("aclmdlRIExecuteAsync", graph, acl.stream())


def no_join(acl: Acl) -> None:
    with acl.capturing() as stream:
        side = acl.stream()
        acl.wait(side, stream)
        acl.fill(side)
        acl.end(stream)


def event_of_another_capture(acl: Acl) -> None:
    with acl.capturing() as stream, acl.capturing() as other:
        acl.wait(other, stream)


def run_in_a_capture(acl: Acl) -> None:
    graph = acl.end(acl.begin())
    with acl.capturing() as stream:
        acl("aclmdlRIExecuteAsync", graph, stream)


def in_a_capture(name: str, *arguments: Callable[[Acl, ctypes.c_void_p], Any]) -> Callable[[Acl], None]:
    """A call while this thread captures, of which no other thread's capture knows."""

    def run(acl: Acl) -> None:
        made = [make(acl, acl.stream()) for make in arguments]
        with acl.capturing(THREAD_LOCAL):
            acl(name, *made)

    return run


def of_a_captured_stream(name: str, *arguments: Any) -> Callable[[Acl], None]:
    def run(acl: Acl) -> None:
        with acl.capturing() as stream:
            acl(name, stream, *arguments)

    return run


def captured_copy_of_pageable_memory(acl: Acl) -> None:
    host, size = ctypes.create_string_buffer(8), ctypes.c_size_t(8)
    with acl.capturing() as stream:
        acl("aclrtMemcpyAsync", acl.room, size, host, size, HOST_TO_DEVICE, stream)


def collective_in_a_task_group(acl: Acl) -> None:
    with acl.capturing() as stream:
        acl("aclmdlRICaptureTaskGrpBegin", stream)
        acl.all_reduce(stream)


def sum_of_int64(acl: Acl) -> None:
    stream = acl.stream()
    acl.all_reduce(stream, HCCL_INT64)
    acl("aclrtSynchronizeStream", stream)


REFUSED: dict[str, tuple[Callable[[Acl], Any], str]] = {
    "a task group that is open": (open_group, "a task group was not ended"),
    "an update of other tasks": (update_of_other_tasks, "a task update is not of the tasks of its group"),
    "an update on a captured stream": (update_on_a_captured_stream, "a task update on a captured stream"),
    "an update beside a run": (update_beside_a_run, "did not wait for the last run of its graph"),
    "a run beside an update": (run_beside_an_update, "did not wait for the last update of its tasks"),
    "a run whose memory is gone": (run_without_memory, "memory that memsetAsync uses was given back"),
    "a stream that is not joined": (no_join, "a stream was not joined again"),
    "an event of another capture": (event_of_another_capture, "the event is of another capture"),
    "a run in a capture": (run_in_a_capture, "while it, or the stream, is captured"),
    "waiting for a stream in a capture": (
        in_a_capture("aclrtSynchronizeStream", lambda _, stream: stream),
        "aclrtSynchronizeStream while a stream is captured",
    ),
    "waiting for an event in a capture": (
        in_a_capture("aclrtSynchronizeEvent", lambda acl, _: acl.event()),
        "aclrtSynchronizeEvent while a stream is captured",
    ),
    "waiting for the card in a capture": (
        in_a_capture("aclrtSynchronizeDevice"),
        "aclrtSynchronizeDevice while a stream is captured",
    ),
    "waiting for a captured stream": (
        of_a_captured_stream("aclrtSynchronizeStream"),
        "aclrtSynchronizeStream: it is captured",
    ),
    "a captured copy of pageable memory": (captured_copy_of_pageable_memory, "that is not page-locked"),
    "a collective in a task group": (collective_in_a_task_group, "HcclAllReduce in a task group"),
    "a sum of int64 by HCCL": (sum_of_int64, "HcclAllReduce reduces no values of dtype 5"),
}
"""Programs, and why each is refused."""
STATUSES = {
    **dict.fromkeys([f"waiting for {what} in a capture" for what in ("a stream", "an event", "the card")], 107030),
    "a captured copy of pageable memory": 107041,
}
"""The statuses that torch_npu's errors and its log quote."""


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_one_check(case: str, acl: Acl) -> None:
    """A program is refused, and passes once that check is switched off."""
    run, words = REFUSED[case]
    with pytest.raises(Refused, match=words) as refused:
        run(acl)
    status, _ = refused.value.args
    assert status == STATUSES.get(case, status)
    with acl.allowing(words):
        run(acl)


WAITS: dict[str, Callable[[Acl, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], Any]] = {
    "by an event": lambda acl, runs, updates, event: acl("aclrtStreamWaitEvent", updates, event),
    "by a stream between": lambda acl, runs, updates, event: (
        acl("aclrtStreamWaitEvent", (between := acl.stream()), event),
        acl.wait(updates, between),
    ),
    "on the host, for the event": lambda acl, runs, updates, event: acl("aclrtSynchronizeEvent", event),
    "on the host, for the stream": lambda acl, runs, updates, event: acl("aclrtSynchronizeStream", runs),
    "on the host, for the card": lambda acl, runs, updates, event: acl("aclrtSynchronizeDevice"),
    "by polls": lambda acl, runs, updates, event: acl.poll(event),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_update_that_waited_for_the_run_and_a_run_that_waited_for_the_update(wait: str, acl: Acl) -> None:
    graph, group = acl.group()
    runs, updates, event = acl.stream(), acl.stream(), acl.event()
    acl("aclmdlRIExecuteAsync", graph, runs)
    acl("aclrtRecordEvent", event, runs)
    WAITS[wait](acl, runs, updates, event)
    acl.update(updates, group)
    acl("aclrtRecordEvent", event, updates)
    WAITS[wait](acl, updates, runs, event)
    acl("aclmdlRIExecuteAsync", graph, runs)


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
