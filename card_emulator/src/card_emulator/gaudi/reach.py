"""Limits on tensor sizes, which result from the width of an engine's offset registers.

The limits come from the graph compiler's sources (HabanaAI/Intel_Gaudi3_Software, `gaudi2/hal.h` and
`gaudi2_hal_reader.cpp`). We assume that the compiler does not split operations on larger tensors, so that they fail.
"""

from __future__ import annotations

import torch

from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.ops import names
from card_emulator.source import here

_INT32, _UINT32 = (1 << 31) - 1, (1 << 32) - 1
_MATRIX_PRODUCTS = names("mm bmm matmul linear addmm baddbmm fp8_gemm_v2")
_COPIES = names("copy_ clone contiguous")


def check_reach(packet: str, operand: torch.Tensor) -> None:
    """Reject an operand or result that contains elements that the operation's engine cannot address.

    Along each dimension, the matrix engine (MME) can address 2^32 - 1 elements, or 2^31 - 1 if they are larger than two
    bytes, and copies (DMA) can address 2^32 - 1 bytes. A copy of contiguous memory has no limit, because it can be
    split. The tensor cores (TPC) can address 2^31 - 1 elements along each dimension except the one with the largest
    stride.
    """
    if not DEVICE.hostile:
        return
    # (stride, offset of the last element) for each dimension, with the largest stride last
    extents = sorted(
        (stride, (size - 1) * stride) for size, stride in zip(operand.shape, operand.stride(), strict=True) if size > 1
    )
    engine, unit, limit = "TPC", "elements", _INT32
    if packet in _MATRIX_PRODUCTS:
        engine, limit = "MME", _UINT32 if operand.element_size() <= 2 else _INT32
    elif packet in _COPIES:
        if operand.is_contiguous():
            return
        engine, unit, limit = "DMA", "bytes", _UINT32
        extents = [(stride, offset * operand.element_size()) for stride, offset in extents]
    else:
        extents = extents[:-1]
    reach = max((offset for _, offset in extents), default=0)
    if reach > limit:
        raise DeviceRefusal(
            f"aten.{packet} of {tuple(operand.shape)} with strides {operand.stride()}, at {here()}: its offsets reach "
            f"{reach} {unit} along one dimension, and the {engine} can address only {limit}"
        )
