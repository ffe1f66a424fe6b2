"""Kernels that are launched before the one ahead of them has ended, so that their launches cost nothing.

CUDA calls it programmatic dependent launch. A kernel that is launched so waits for the one before it by itself, and
may do first what does not depend on that one, such as reading weights. Graphs record it.
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
    """For the launch of a kernel that waits by `wait`. Asked when one is launched: to know the GPU is to open it."""
    can = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)  # from Hopper on
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Before the first access to what another kernel wrote or may still read. Every instance has to come here, or a
    later kernel would not wait for what is before this one."""
    if EARLY:
        gdc_wait()


@triton.jit
def begin(EARLY: tl.constexpr):
    """Both, for kernels with nothing to do before."""
    let_next_start(EARLY)
    wait(EARLY)


@triton.jit
def fetch(pointers, EARLY: tl.constexpr):
    """Begin to bring what is there into the cache: before `wait`, what no kernel writes."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.uint64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
