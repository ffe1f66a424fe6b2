"""Decides whether to fork the engine process. This halves its start time, because a spawned process imports vLLM again.

GNU OpenMP does not survive a fork once its threads exist: the child's first parallel loop waits for threads that it
does not have. Whether they exist cannot be detected from outside, so a child is forked and asked to compute something.

Intel's OpenMP survives a fork but binds the child's first thread to the first core. This is faster for a single rank.
Several ranks would compete for that core, so they are spawned instead. A forked process keeps its parent's libraries.
An `LLM(...)` engine therefore uses Intel's OpenMP only if its script was started with it or if the engine is spawned.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)

_PATIENCE_S = 2.0
# The number of elements is large enough for torch to split the work across threads.
_ELEMENTS = 1 << 20

_has_threads = False
"""Whether a child timed out. OpenMP's threads live as long as the process, so later children would also time out."""


def start_method(num_ranks: int) -> str:
    global _has_threads
    if num_ranks > 1 and _has_intels_openmp():
        return "spawn"
    if not _has_threads and _forked_child_can_compute():
        return "fork"
    _has_threads = True
    logger.info(
        "The engine process is spawned, which takes longer, because this process has already computed with torch."
    )
    return "spawn"


def _has_intels_openmp() -> bool:
    """Whether Intel's OpenMP is loaded in this process and would therefore be loaded in a forked one."""
    return hasattr(ctypes.CDLL(None), "kmp_get_blocktime")


def _forked_child_can_compute() -> bool:
    child = os.fork()
    if child == 0:
        # Whatever happens, the child must not return into the code that forked it.
        try:
            torch.ones(_ELEMENTS).exp_()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
