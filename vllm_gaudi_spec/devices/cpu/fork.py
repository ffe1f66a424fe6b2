"""Whether the engine process may be forked: it starts in half the time of a spawned one, which imports vLLM again.

GNU OpenMP does not survive a fork once its threads exist: the child's first parallel loop waits for threads that it
does not have. Nothing shows from outside whether they exist, so a child is forked and asked to compute.

Intel's OpenMP survives a fork and binds the first thread of the child to the first core. One rank alone is faster so;
several would compute on that core in turns, and are spawned. A forked process has the libraries of its parent, so an
engine of `LLM(...)` computes with Intel's OpenMP only if its script was started with it, or if it is spawned.
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
# Large enough for torch to split it over threads.
_ELEMENTS = 1 << 20

_has_threads = False
"""Whether a child waited in vain. OpenMP's threads stay as long as the process, so any later one would, too."""


def start_method(num_ranks: int) -> str:
    global _has_threads
    if num_ranks > 1 and _has_intels_openmp():
        return "spawn"
    if not _has_threads and _forked_child_can_compute():
        return "fork"
    _has_threads = True
    logger.info("This process has computed with torch already: the engine process is spawned, which takes longer.")
    return "spawn"


def _has_intels_openmp() -> bool:
    """Whether this process has loaded it, and with it a forked one."""
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
