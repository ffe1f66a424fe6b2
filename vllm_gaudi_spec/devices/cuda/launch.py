"""Programmatic dependent launch, in which a kernel starts before the preceding one has finished to hide launch costs.

The kernel itself waits for the preceding kernel. Before waiting, it can do work that does not depend on the preceding
kernel, such as loading weights. CUDA graphs record this dependency.
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
    """Return launch options for a kernel that calls `wait`.

    Call this function only at launch, because querying the compute capability opens the GPU.
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

    Every instance that does any work must call this function. A later kernel waits only for this kernel, which must
    therefore not finish before all preceding kernels have finished.
    """
    if EARLY:
        gdc_wait()


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next kernel start, and then wait for the preceding one. For kernels without work before waiting."""
    let_next_start(EARLY)
    wait(EARLY)


@triton.jit
def fetch(pointers, EARLY: tl.constexpr):
    """Load memory into the cache before `wait`. No kernel may write to this memory."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.uint64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
