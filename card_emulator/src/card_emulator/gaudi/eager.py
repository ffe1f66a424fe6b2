"""Operations outside compiled regions in compiled mode.

The bridge compiles each of these operations separately and reuses the result for all calls with the same cache key,
even if their sizes differ (v1.24.0, habana_eager/eager_exec.cpp, calculate_operator_key).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.source import here
from card_emulator.tensor import DeviceTensor, check_before

_FLAG = "PT_HPU_ENABLE_EAGER_CACHE"


def _concatenation(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Reject a concatenation that would reuse the wrong recipe (C35).

    The cache key does not include the dimension of the concatenation, but a recipe for the last dimension cannot be
    used for any other dimension (HabanaAI/Intel_Gaudi3_Software, concatenate_node.cpp).
    """
    if DEVICE.lazy or not DEVICE.hostile or DEVICE.capture is not None or DEVICE.bridge_flags.get(_FLAG):
        return
    tensors: Sequence[Any] = args[0]
    if len({id(tensor) for tensor in tensors}) < len(tensors) or len(tensors) < 2:
        return
    if not all(isinstance(tensor, DeviceTensor) and tensor.dim() for tensor in tensors):
        return  # torch raises its own error
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    num_dims = tensors[0].dim()
    is_last = dim % num_dims == num_dims - 1
    of_last = is_last and all(tensor.element_size() < 8 for tensor in tensors)
    key = _key(tensors)
    if key not in DEVICE.concatenations:
        DEVICE.concatenations[key] = of_last, here()
    first_of_last, first_from = DEVICE.concatenations[key]
    if first_of_last and not is_last:
        raise DeviceRefusal(
            f"aten.cat along dimension {dim} outside of regions, at {here()}: it would reuse the recipe of a "
            f"concatenation along the last dimension, from {first_from}, which supports only that dimension"
        )


def _key(tensors: Sequence[DeviceTensor]) -> Hashable:
    memories: dict[int, int] = {}
    return tuple(
        (
            memories.setdefault(id(tensor.memory), len(memories)),
            tensor.dtype,
            tensor.part,
            tensor.is_contiguous(),
            tensor.dim(),
        )
        for tensor in tensors
    )


def register() -> None:
    check_before("cat.default", _concatenation)
