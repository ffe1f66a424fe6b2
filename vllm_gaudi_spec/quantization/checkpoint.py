"""Reads a quantized checkpoint as if its weights were in the model's dtype.

Linear layers can stay quantized if the device has kernels for them. All other layers are loaded as from an unquantized
checkpoint, so merged layers, tensor parallelism, MLA, LoRA, and experts need no special code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_gaudi_spec.config import OTHER_MODEL
from vllm_gaudi_spec.quantization.encodings import Encoding, EncodingError, Parts
from vllm_gaudi_spec.quantization.formats import CheckpointFormat

# Tensors that are used for activations or by other kernels and do not affect weights.
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "qscale_act",
    "weight_shape",
    "bias_scale",
)
# Alternative names of scales, which are used in Mistral checkpoints and by some FP8 tools.
_ALIASES = {"weight_scale_inv": "weight_scale", "qscale_weight": "weight_scale"}
_QUANTIZED = re.compile(
    r"(^|_)(packed|qweight|qzeros|g_idx|weight_zero_point|weight_scale(_2)?|scale_inv|weight_global_scale|qscale_weight)$"
)


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A reader for the tensors in a quantized checkpoint."""

    model: str
    """The model's folder or name, for use in messages."""
    format: CheckpointFormat
    dtype: torch.dtype
    is_native: Callable[[str], bool] = field(default=lambda layer: False)
    """Whether a layer stays quantized, as e4m3 weights with per-row scales or as 4-bit integers packed in words."""
    is_unused: Callable[[str], bool] = field(default=lambda name: False)
    """Whether the model ignores tensors with a given name."""
    _waiting: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """The tensors of incomplete weights. Maps each layer to those of its weight's tensors that have been read so
    far."""

    def weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the model. `tensors` contains all tensors in its files, in any order."""
        for name, tensor in tensors:
            if self.is_unused(name):
                continue
            layer, _, part = name.rpartition(self.format.before_part)
            encoding = self.format.find_encoding(layer)
            if encoding is not None and part not in encoding.parts:
                part = _ALIASES.get(part, part)
            is_plain = part == "weight" and tensor.dtype.itemsize > 1  # in a layer that is not quantized
            if encoding is None or part not in encoding.parts or is_plain:
                # Keep the tensors of a `fake_quantizer`, because they are KV scales.
                if part not in (*_UNUSED, *self.format.unused) or layer.endswith("_fake_quantizer"):
                    self._check_plain(name, part, tensor)
                    yield name, tensor
                continue
            parts = self._waiting.setdefault(layer, {})
            parts[part] = tensor
            if all(needed in parts for needed in encoding.parts):
                yield from self._read(layer, encoding, self._waiting.pop(layer))
        for layer, parts in self._waiting.items():
            encoding = self.format.find_encoding(layer)
            assert encoding is not None
            list(self._read(layer, encoding, parts))  # raises an error that names the missing tensor

    def _check_plain(self, name: str, part: str, tensor: torch.Tensor) -> None:
        """Raise EncodingError for quantized values that the model would otherwise load as weights."""
        is_byte = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
        if is_byte or _QUANTIZED.search(part):
            reason = f"is quantized in a way that config.json ({self.format.name}) does not describe"
            raise EncodingError(f"{self.model}: {name} {reason}; {OTHER_MODEL}.", remedy=OTHER_MODEL)

    def _read(self, layer: str, encoding: Encoding, parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            found = self._convert(layer, encoding, parts)
        except EncodingError as error:
            reason = f"{self.model}: layer {layer} {error}; {error.remedy}."
            raise EncodingError(reason, remedy=error.remedy) from error
        for part, tensor in found.items():
            yield f"{layer}{self.format.weight if part == 'weight' else f'.{part}'}", tensor.contiguous()

    def _convert(self, layer: str, encoding: Encoding, parts: Parts) -> dict[str, torch.Tensor]:
        stored = parts.get("weight")
        is_e4m3 = stored is not None and stored.dtype == torch.float8_e4m3fn
        if not ((is_e4m3 or encoding.grouped is not None) and self.is_native(layer)):
            return {"weight": self._cast(encoding.weight(parts))}
        if is_e4m3:
            weight, scale = encoding.fp8_rows(parts)
            _check_finite(weight.float(), scale)
            return {"weight": weight, "weight_scale": scale}
        words = encoding.words(parts)
        _check_finite(words.scales_GN)
        return {
            "weight_packed": words.weight_KW,
            "weight_scale": words.scales_GN,
            "weight_zero_point": words.zeros_GW,
        }

    def _cast(self, weight: torch.Tensor) -> torch.Tensor:
        made = weight.to(self.dtype)
        if not _is_finite(made):
            _check_finite(weight)
            raise EncodingError(f"has values beyond {dtype_name(self.dtype)}", remedy="use --dtype bfloat16")
        return made


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_finite(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or bool(tensor.isfinite().all())


def _check_finite(*tensors: torch.Tensor) -> None:
    if not all(map(_is_finite, tensors)):
        raise EncodingError("has scales or values that are not finite")


class _Headers(Checkpoint):
    """A reader for meta tensors, which decodes only one of several weights with the same shapes and dtypes, to save
    time."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._fit: set[Hashable] = set()

    def _read(self, layer: str, encoding: Encoding, parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
        kind = encoding, frozenset((part, tensor.shape, tensor.dtype) for part, tensor in parts.items())
        if kind not in self._fit:
            yield from super()._read(layer, encoding, parts)
            self._fit.add(kind)


def find_misfit(model: str, format: CheckpointFormat, files: Iterable[Path], damage_alone: bool = False) -> str | None:
    """Return the reason why a checkpoint cannot be read, according to its file headers, or None if it can be.

    Args:
        damage_alone: Report only damage that affects every reader, including vLLM.
    """
    error = _misfit(model, format, _headers(files))
    return None if error is None or (damage_alone and not error.is_damage) else str(error)


def check_tensors(
    model: str, format: CheckpointFormat, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors unchanged, for vLLM's own kernels. Raises EncodingError if scales are missing or not finite.

    vLLM itself would accept non-finite scales and leave missing scales uninitialized.
    """
    headers: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        if "scale" in name.rpartition(".")[2] and not _is_finite(tensor.float()):
            raise EncodingError(f"{model}: {name} has values that are not finite; download or copy the model again.")
        headers.append((name, torch.empty_like(tensor, device="meta")))
        yield name, tensor
    error = _misfit(model, format, headers)
    if error is not None and error.is_damage:
        raise error


def _misfit(model: str, format: CheckpointFormat, headers: Iterable[tuple[str, torch.Tensor]]) -> EncodingError | None:
    """Decode meta tensors in the same way as real tensors, and return the error that this causes, or None."""
    try:
        for _ in _Headers(model=model, format=format, dtype=torch.float32).weights(headers):
            pass
    except EncodingError as error:
        return error
    return None


def _headers(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                header = opened.get_slice(name)
                dtype = _DTYPES.get(header.get_dtype())
                if dtype is not None:
                    yield name, torch.empty(header.get_shape(), dtype=dtype, device="meta")


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Maps safetensors dtype names to torch dtypes."""
