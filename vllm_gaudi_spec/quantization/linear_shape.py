"""How vLLM spreads the weight of a linear layer over tensor-parallel ranks."""

from __future__ import annotations

from torch import nn

from vllm_gaudi_spec.quantization.files import LinearShape, Part
from vllm_gaudi_spec.upstream.linear import ColumnParallelLinear, ParallelLMHead, QKVParallelLinear, RowParallelLinear


def linear_shape(linear: nn.Module) -> LinearShape:
    """Of one that is not quantized: its weight is [rows of this rank, columns of this rank]."""
    rows, columns = linear.weight.shape
    world = getattr(linear, "tp_size", 1)
    if getattr(linear, "disable_tp", False):
        return LinearShape("whole", (Part(rows),), columns)
    if isinstance(linear, QKVParallelLinear):
        heads, kv_heads = linear.total_num_heads, linear.total_num_kv_heads
        sizes = [(heads, linear.head_size), (kv_heads, linear.head_size), (kv_heads, linear.v_head_size)]
        return LinearShape("rows", tuple(Part(count * size, count) for count, size in sizes), columns)
    if isinstance(linear, ColumnParallelLinear):
        return LinearShape("rows", tuple(Part(size * world) for size in linear.output_partition_sizes), columns)
    if isinstance(linear, ParallelLMHead):
        return LinearShape("rows", (Part(rows * world),), columns)
    if isinstance(linear, RowParallelLinear):
        return LinearShape("columns", (Part(rows),), columns * world)
    return LinearShape("whole", (Part(rows),), columns)
