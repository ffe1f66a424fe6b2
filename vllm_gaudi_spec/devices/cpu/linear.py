"""Linear layers on the CPU: chooses the storage format of each weight, and the kernel that multiplies by it.

The duration of a step with few tokens depends on the number of bytes in the weights, because it reads every weight
once. Most weights from bfloat16 and float16 checkpoints can be stored exactly in float16, if necessary with a
power-of-two scale for the matrix. FBGEMM multiplies float32 activations by float16 weights, which halves the bytes and
adds no rounding, so steps with few tokens use a float16 copy. Steps with many tokens are compute-bound, so they use
oneDNN's float32 kernel, which is faster for them (benchmarks/results/small_gemm_cpu.json).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger

from vllm_gaudi_spec.config import FLOAT16, FLOAT32, Options, UnsupportedConfigError, format_size
from vllm_gaudi_spec.quantization.config import get_cpu_weights
from vllm_gaudi_spec.upstream.layers import LinearBase, ParallelLMHead, VocabParallelEmbedding

logger = init_logger(__name__)

# The maximum number of rows for which the float16 kernel is faster, with both AVX2 and AVX-512.
FEW_ROWS = 24

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The `cpu_linear` function of a layer. It takes the input, the layer's weight (empty if it was packed), and the
bias."""


@dataclass(frozen=True, slots=True)
class Float16Linear:
    packed: Any
    scale: float | None
    """A power of two; None means 1."""
    nbytes: int

    @classmethod
    def of(cls, weight_NK: torch.Tensor, scale: float) -> Float16Linear:
        """Convert a weight divided by `scale`. Values that float16 cannot represent are rounded."""
        scaled_NK = weight_NK if scale == 1 else weight_NK / scale
        packed = torch.ops.quantized.linear_prepack_fp16(scaled_NK, None)
        return cls(packed, None if scale == 1 else scale, weight_NK.numel() * 2)

    @classmethod
    def exact(cls, weight_NK: torch.Tensor) -> Float16Linear | None:
        """Convert a weight without rounding, or return None if that is impossible or float16 has no kernel."""
        scale = _find_exact_scale(weight_NK) if has_float16_kernel() else None
        return None if scale is None else cls.of(weight_NK, scale)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scaled = x if self.scale is None else x * self.scale
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(scaled, self.packed)
        return out if bias is None else out.add_(bias)


@dataclass(frozen=True, slots=True)
class ByRows:
    few: Float16Linear
    many: Linear

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        chosen = self.few if x.numel() <= FEW_ROWS * x.shape[-1] else self.many
        return chosen(x, weight, bias)


class Float32Logits:
    """An output matrix in bfloat16 or float16 that produces float32 logits.

    A 16-bit kernel would round logits to multiples of up to 0.125, so that the two best logits would often be equal.
    For few rows, an exact float16 copy of the weight is used. For many rows, slices of the weight are converted to
    float32 one after the other. oneDNN may convert a slice back to bfloat16, which is exact for a bfloat16 weight.
    """

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._weight_NK = weight_NK
        self.few = Float16Linear.exact(weight_NK.float())

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide, bias = x.float(), None if bias is None else bias.float()
        if self.few is not None and x.numel() <= FEW_ROWS * x.shape[-1]:
            return self.few(wide, weight, bias)
        with _fast_float32(self._weight_NK.dtype):
            slices = self._weight_NK.split(max(_SLICE_NUMBERS // x.shape[-1], 1))
            out = torch.cat([torch.nn.functional.linear(wide, part.float()) for part in slices], dim=-1)
        return out if bias is None else out.add_(bias)


# The number of weight elements converted at a time. Larger slices do not fit in a core's cache.
_SLICE_NUMBERS = 1 << 22


@contextmanager
def _fast_float32(dtype: torch.dtype) -> Iterator[None]:
    """If `dtype` is bfloat16, let oneDNN compute float32 matmuls in bfloat16. This is exact for `dtype` values."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _is_float16(weight: torch.Tensor) -> bool:
    return torch.equal(weight.half().float(), weight)


def _choose_power_of_two(weight: torch.Tensor) -> float:
    """Return the power of two by which to divide a matrix, so that its largest element is below 2^15."""
    _, exponent = torch.frexp(weight.abs().amax())
    return 2.0 ** (int(exponent) - 15)


def _find_exact_scale(weight: torch.Tensor) -> float | None:
    """Return a power of two by which the matrix can be divided to become exact in float16, or None if there is none."""
    if _is_float16(weight):
        return 1.0
    scale = _choose_power_of_two(weight)
    return scale if _is_float16(weight / scale) else None


def has_float16_kernel() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def refuse_missing_kernel(options: Options) -> None:
    if options.cpu_weights == FLOAT16 and not has_float16_kernel():
        raise UnsupportedConfigError(
            f"cpu_weights {FLOAT16} has no kernel for this CPU; use {FLOAT32} in additional_config.gaudi_spec."
        )


_LINEAR = "gaudi_spec_linear"
"""The name of the attribute in which a weight stores its `Linear`, so that two layers can share it. The attribute's
value must not be replaced."""


def _choose_on_first_call(make: Callable[[], Linear]) -> Linear:
    """Return a `Linear` that chooses its kernel on the first call. It is used for embedding tables, which most models
    never use in a matmul."""
    chosen = cache(make)
    return lambda x, weight, bias: chosen()(x, weight, bias)


class _State:
    keeps_weights = False
    num_threads: int | None = None
    """Torch's thread count when this process packed its first weight."""


def _keep_num_threads() -> None:
    """Restore torch's thread count to its value when the first weight was packed.

    oneDNN's packed layout depends on the thread count, but vLLM caches oneDNN's kernels by weight shape alone. If the
    thread count changed, a second weight with the same shape could have a different layout and would be misread. This
    can happen if a process creates several engines, because a multi-rank engine sets the thread count to one.
    """
    found = torch.get_num_threads()
    if _State.num_threads is None:
        _State.num_threads = found
    elif found != _State.num_threads:
        logger.warning(
            "torch has %d threads, but it had %d when this process loaded its first model. The number was reset, "
            "because all weights in a process must be packed for the same number of threads. Use a separate process "
            "for each number of threads.",
            found,
            _State.num_threads,
        )
        torch.set_num_threads(_State.num_threads)


@contextmanager
def keep_unpacked() -> Iterator[None]:
    """Leave weights that are loaded in this context unpacked, so that they can be converted later."""
    _State.keeps_weights = True
    try:
        yield
    finally:
        _State.keeps_weights = False


def pack(original: Callable[..., None], layer: LinearBase | VocabParallelEmbedding, remove_weight: bool) -> None:
    """Choose the kernel for a newly loaded layer.

    Args:
        original: The vLLM function that this function replaces.
        remove_weight: Whether the unpacked weight is no longer needed. Embedding tables need theirs for token lookup.
    """
    weight = layer.weight
    if _State.keeps_weights:
        layer.cpu_linear = torch.nn.functional.linear
        return
    _keep_num_threads()
    weight_format = get_cpu_weights(get_current_vllm_config())
    is_16_bit = weight.dtype in (torch.bfloat16, torch.float16)
    if is_16_bit and isinstance(layer, VocabParallelEmbedding) and not weight.is_meta:
        make_logits = partial(Float32Logits, weight.detach())
        layer.cpu_linear = make_logits() if isinstance(layer, ParallelLMHead) else _choose_on_first_call(make_logits)
        return
    if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32 or weight_format == FLOAT32:
        original(layer, remove_weight)
        return
    choose = partial(_choose, original, layer, weight.detach(), remove_weight, weight_format)
    if remove_weight:
        layer.cpu_linear = choose()
    elif isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        layer.cpu_linear = _choose_on_first_call(choose)
    else:
        if not hasattr(weight, _LINEAR):
            setattr(weight, _LINEAR, choose())
        layer.cpu_linear = getattr(weight, _LINEAR)


def _choose(
    original: Callable[..., None],
    layer: LinearBase,
    weight: torch.Tensor,
    remove_weight: bool,
    weight_format: str | None,
) -> Linear:
    if weight_format is not None:
        if remove_weight:
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        return Float16Linear.of(weight, _find_exact_scale(weight) or _choose_power_of_two(weight))
    few = Float16Linear.exact(weight)
    chosen = getattr(layer, "cpu_linear", None)
    # This call may keep the weight even if `remove_weight` is set, because vLLM cannot pack all weights.
    original(layer, remove_weight)
    many: Linear = layer.cpu_linear
    if chosen is not None:
        layer.cpu_linear = chosen
    return many if few is None else ByRows(few, many)


def repack(model: nn.Module, *, dropped: bool) -> None:
    """Repack embeddings and output matrices after a weight update, or free all packed weights if `dropped` is set.

    vLLM itself repacks all other weights that it loads. It does not repack an output matrix tied to the embeddings.
    """
    tables = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    for layer in tables:
        vars(layer.weight).pop(_LINEAR, None)  # clear it on all tables before packing a weight that they share
    for layer in () if dropped else tables:
        layer.quant_method.process_weights_after_loading(layer)
    for module in model.modules() if dropped else ():
        vars(module).pop("cpu_linear", None)


def log_copies(model: nn.Module) -> None:
    linears = {id(linear): linear for module in model.modules() if (linear := getattr(module, "cpu_linear", None))}
    copies = [few.nbytes for linear in linears.values() if (few := getattr(linear, "few", None)) is not None]
    if copies:
        logger.info(
            "Steps with up to %d tokens use exact float16 copies of %d of the %d weight matrices, which is faster. "
            "To save the %s that these copies use, set cpu_weights to float32 in additional_config.gaudi_spec.",
            *(FEW_ROWS, len(copies), len(linears), format_size(sum(copies))),
        )
