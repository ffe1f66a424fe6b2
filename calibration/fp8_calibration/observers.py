"""Measures the largest |x| of a model's tensors without Intel Neural Compressor (INC), for real tokens only.

Workers import this module as their `worker_extension_cls`. Padding also passes through the model: token 0 at position
0, and whatever follows a row's end. A mask of each forward has the real tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.logger import init_logger

from fp8_calibration.writing import write_files
from vllm_gaudi_spec.attention.operations import Matmul, Rows, Softmax, VLLMKVCache
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization import files, simulation
from vllm_gaudi_spec.quantization.config import LoadContext, QuantConfig
from vllm_gaudi_spec.quantization.files import LinearShape, Part
from vllm_gaudi_spec.quantization.layers import serve_linear
from vllm_gaudi_spec.quantization.simulation import (
    CACHE,
    CACHE_OF,
    LINEARS,
    LOGITS,
    MATMUL,
    SOFTMAX,
    SUMS,
    Found,
    find_modules,
)
from vllm_gaudi_spec.upstream.layers import (
    ColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
)

logger = init_logger(__name__)


class RealTokens:
    """The mask of a forward's T real tokens. None outside of forwards, where nothing is measured."""

    real_T: torch.Tensor | None = None

    @contextmanager
    def counting(self, real_T: torch.Tensor) -> Iterator[None]:
        self.real_T = real_T
        try:
            yield
        finally:
            self.real_T = None

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, ...] with zeros for tokens that are not real."""
        if self.real_T is None:
            return torch.zeros_like(x)
        return torch.where(self.real_T.view(-1, *[1] * (x.dim() - 1)), x, 0)


class MaxAbs(nn.Module):
    """The largest |x| so far, as [1, 1] like in a file."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1, 1), persistent=False)

    def see(self, x: torch.Tensor) -> None:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax().float()))


class MeasuredLinear(nn.Module):
    """A `quant_method` that measures a linear layer."""

    def __init__(self, layer: Any, tokens: RealTokens, *, measures_outputs: bool, measures_sums: bool) -> None:
        """Measure a layer, and with `measures_sums` also the sum of the ranks' outputs, which the layer returns."""
        super().__init__()
        self._method = getattr(layer, "quant_method", None)
        self._tokens = tokens
        self.weight_N1 = layer.weight.detach().float().abs().amax(1, keepdim=True)
        """The largest |x| of each output."""
        self.input = MaxAbs()
        self.output = MaxAbs() if measures_outputs else None
        self.sum = MaxAbs() if measures_sums else None
        if self.sum is not None:
            layer.register_forward_hook(self._see_sum)

    def apply(  # type: ignore[override]  # as in vLLM's linear methods
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.input.see(self._tokens.mask(x))
        if self.output is None:
            return self._multiply(layer, x, bias)
        out = self._multiply(layer, x, None)
        self.output.see(self._tokens.mask(out))
        return out if bias is None else out + bias

    def _multiply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._method is None:
            return nn.functional.linear(x, layer.weight, bias)
        out: torch.Tensor = self._method.apply(layer, x, bias)
        return out

    def _see_sum(self, layer: nn.Module, args: Any, output: Any) -> None:
        assert self.sum is not None
        self.sum.see(self._tokens.mask(output[0] if isinstance(output, tuple) else output))

    def outputs(self) -> list[MaxAbs]:
        return [part for part in (self.output, self.sum) if part is not None]


class MeasuredMatmul(Matmul):
    """A matmul that measures its first operand. The second comes from a cache, which measures it when it is written.

    Queries of padding must be zero. Softmax results of padding are below 1, which the first token of any request
    reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input = MaxAbs()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.input.see(x)
        return super().forward(x, y)


class MeasuredSoftmax(Softmax):
    """A softmax that measures its result."""

    def __init__(self) -> None:
        super().__init__()
        self.output = MaxAbs()

    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        weights = super().forward(x, dim)
        self.output.see(weights)
        return weights


class MeasuredCache(VLLMKVCache):
    """A KV cache that measures what is written."""

    def __init__(self, tokens: RealTokens) -> None:
        super().__init__()
        self._tokens = tokens
        self.input = MaxAbs()

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        self.input.see(self._tokens.mask(input))
        return super().forward(input, cache, slot_mapping)


class Measured:
    """Measures a model's modules; see `Measuring`."""

    reads_logits = False

    def __init__(self, model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> None:
        self._tokens = RealTokens()
        self._quant_config, self._load_context = quant_config, load_context
        self._measured: dict[str, nn.Module] = {}
        self._linears: dict[str, files.LinearShape] = {}
        for found in find_modules(model, quant_config, load_context.apart):
            if found.kind in LINEARS:
                self._linears[found.name] = _get_linear_shape(found.module)
            self._measured[found.name] = self._measure(found)
            self.reads_logits |= found.kind == LOGITS
        module: Any
        for module in model.modules():
            if isinstance(getattr(module, "matmul_qk", None), MeasuredMatmul):
                module.zero_padding = self._tokens.mask
        logger.info("%s: measuring %d modules.", quant_config.option, len(self._measured))

    def counting(self, real_T: torch.Tensor) -> AbstractContextManager[None]:
        return self._tokens.counting(real_T)

    def _measure(self, found: Found) -> nn.Module:
        if found.kind in LINEARS:
            sums = found.kind == SUMS
            linear = MeasuredLinear(
                found.module,
                self._tokens,
                measures_outputs=sums or self._quant_config.measures_outputs,
                measures_sums=sums,
            )
            serve_linear(found.module, linear)
            return linear
        measured: nn.Module = {
            MATMUL: MeasuredMatmul,
            SOFTMAX: MeasuredSoftmax,
            CACHE: lambda: MeasuredCache(self._tokens),
        }[found.kind]()
        setattr(found.parent, found.last, measured)
        return measured

    def write(self) -> None:
        """Write all values since the model was loaded, replacing older files."""
        seen = {name: self._node(name, measured) for name, measured in self._measured.items()}
        if not any(map(_saw_something, seen.values())):
            logger.warning("%s: no request was served, so no measurements are written.", self._quant_config.option)
            return
        record = files.Record(
            rank=self._load_context.rank,
            world=self._load_context.world,
            mode=files.MEASURED,
            nodes={name: node for name, node in seen.items() if _saw_something(node)},
            looked_at=list(self._measured),
            linears=self._linears,
        )
        try:
            path = write_files(self._quant_config.dump_stats_path, record)
        except files.QuantFilesError as error:
            raise UnsupportedConfigError(f"{self._quant_config.option}: {error}.") from None
        logger.info(
            "%s: wrote measurements of %d of %d modules to %s.",
            self._quant_config.option,
            len(record.nodes),
            len(seen),
            path,
        )

    def _node(self, name: str, measured: nn.Module) -> files.Node:
        if isinstance(measured, MeasuredLinear):
            weight = {"weight": measured.weight_N1.cpu().numpy()}
            return files.Node([_value(measured.input)], [_value(part) for part in measured.outputs()], weight)
        if isinstance(measured, MeasuredMatmul):
            prefix, _, last = name.rpartition(".")
            cache = self._measured.get(f"{prefix}.{CACHE_OF[last]}")
            seconds = [_value(cache.input)] if isinstance(cache, MeasuredCache) else []
            return files.Node([_value(measured.input), *seconds])
        if isinstance(measured, MeasuredSoftmax):
            return files.Node([], [_value(measured.output)])
        assert isinstance(measured, MeasuredCache)
        return files.Node([_value(measured.input)])


def _value(part: MaxAbs) -> np.ndarray:
    return part.largest.cpu().numpy().copy()


def _saw_something(node: files.Node) -> bool:
    return any((values > 0).any() for values in (*node.inputs, *node.outputs))


def _get_linear_shape(linear: Any) -> LinearShape:
    """Return how vLLM splits a linear layer's weight among tensor-parallel ranks.

    The layer must not be quantized: its weight is [rows of this rank, columns of this rank].
    """
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


simulation.measure = Measured


class Extension:
    """No methods: naming it as `worker_extension_cls` makes workers import this module."""
