"""Programmatic dependent launch: to hide launch latencies, a kernel starts before the preceding kernel has finished.

The kernel itself waits for the preceding kernel. Before that, it can do work that does not depend on the preceding
kernel, such as loading weights. CUDA graphs support such launches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def options() -> dict[str, Any]:
    """Return the launch options for a kernel that calls `wait`.

    Call this function only when a kernel is launched, because it opens the GPU to query the compute capability.
    """
    can = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)  # Hopper and later
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait for the preceding kernel before accessing data that another kernel wrote or may still read.

    Every program instance that does any work must call this function. The next kernel waits only for this kernel, so
    this kernel must not finish before the preceding ones.
    """
    if EARLY:
        gdc_wait()


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the preceding one. Use this in kernels that have nothing to do before."""
    let_next_start(EARLY)
    wait(EARLY)


@triton.jit
def fetch(pointers, EARLY: tl.constexpr):
    """Load memory that no kernel writes, such as weights, into the cache before `wait` is called."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.uint64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
