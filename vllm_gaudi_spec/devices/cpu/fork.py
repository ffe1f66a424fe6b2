"""Decides whether to fork or spawn the engine process. Forking halves the start time, because a spawned process has to
import vLLM again.

GNU OpenMP does not survive a fork once its threads exist: the child's first parallel loop waits for threads that exist
only in the parent. There is no way to query whether these threads exist, so a child is forked to try a computation.

Intel's OpenMP survives a fork but binds the child's first thread to the first core. This is faster for a single rank,
but several ranks would compete for that core, so they are spawned. Because a forked process uses the libraries that its
parent has loaded, an `LLM(...)` engine uses Intel's OpenMP only if the script loaded it at startup or if the engine is
spawned.
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
# The number of elements in the test computation, which is large enough for torch to use several threads.
_ELEMENTS = 1 << 20

_has_threads = False
"""Whether a child timed out. OpenMP threads live as long as the process, so later children would also time out."""


def start_method(num_ranks: int) -> str:
    global _has_threads
    if num_ranks > 1 and _has_intels_openmp():
        return "spawn"
    if not _has_threads and _forked_child_can_compute():
        return "fork"
    _has_threads = True
    logger.info(
        "Spawning the engine process instead of forking it, because torch has already started threads in this process. "
        "This takes longer."
    )
    return "spawn"


def _has_intels_openmp() -> bool:
    """Whether this process has loaded Intel's OpenMP, which a forked process would then use as well."""
    return hasattr(ctypes.CDLL(None), "kmp_get_blocktime")


def _forked_child_can_compute() -> bool:
    child = os.fork()
    if child == 0:
        # Under no circumstances may the child return into the code that forked it.
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
