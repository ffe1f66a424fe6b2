"""Decodes quantized matrices from the tensors with which a checkpoint represents a weight.

Decoding uses float32 torch operations. N: outputs. K: inputs. It also works on meta tensors, which are created from
file headers to detect invalid tensors before any data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from vllm_gaudi_spec.config import OTHER_MODEL

Parts = Mapping[str, torch.Tensor]
"""The tensors that represent a weight, keyed by the suffixes of their names."""
Read = TypeVar("Read")
Block = tuple[int, int]
"""The number of rows and the number of columns that share a scale, where -1 means all rows or columns."""

TENSOR, CHANNEL = (-1, -1), (1, -1)
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word at which AWQ stores each of eight columns."""
E4M3 = torch.finfo(torch.float8_e4m3fn).max
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


_OTHER_COPY = "download or copy the model again"


class EncodingError(ValueError):
    """Raised for tensors that are not valid in their format. The message states the reason in one line."""

    def __init__(self, reason: str, *, remedy: str = _OTHER_COPY) -> None:
        super().__init__(reason)
        self.remedy = remedy

    @property
    def is_damage(self) -> bool:
        """Whether no reader, including vLLM, could read the tensors."""
        return self.remedy == _OTHER_COPY


class Grouped(NamedTuple):
    """A weight stored as unsigned integers. Its inputs form G groups, which share scales and zero points."""

    values_KN: torch.Tensor
    scales_GN: torch.Tensor
    zeros_GN: torch.Tensor
    groups_K: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the weight as float32 [N, K]."""
        shifted_KN = (self.values_KN - self.zeros_GN[self.groups_K]).float()
        return (shifted_KN * self.scales_GN[self.groups_K]).t()


class Words(NamedTuple):
    """A weight packed as 4-bit integers. Each of W int32 words contains eight outputs, starting at the lowest bits."""

    weight_KW: torch.Tensor
    scales_GN: torch.Tensor
    zeros_GW: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    parts: tuple[str, ...]
    """The name suffixes of the tensors that represent a weight. All of them are required."""
    decode: Callable[[Parts], torch.Tensor]
    """Returns float32 [N, K], or bfloat16 [E, K, N] for stacked experts."""
    rows: Callable[[Parts], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Returns the weight as e4m3 values and one scale per row [N, 1]. It is None for encodings that do not allow
    this."""
    grouped: Callable[[Parts], Grouped] | None = None
    """Returns the weight as integers in groups of `group_size` inputs. It is None for all other encodings, and if
    groups are not in input order."""
    group_size: int = 0

    def weight(self, parts: Parts) -> torch.Tensor:
        return self._checked(parts, self.decode)

    def fp8_rows(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.rows is not None
        return self._checked(parts, self.rows)

    def words(self, parts: Parts) -> Words:
        grouped = self.grouped
        assert grouped is not None
        return self._checked(parts, lambda tensors: _words(grouped(tensors)))

    def _checked(self, parts: Parts, read: Callable[[Parts], Read]) -> Read:
        if missing := [part for part in self.parts if part not in parts]:
            raise EncodingError(f"has no {missing[0]}")
        try:
            return read(parts)
        except (RuntimeError, IndexError) as error:  # torch raises these if shapes or indices do not match
            raise EncodingError(f"has tensors that do not fit: {str(error).splitlines()[0]}") from error


# ---- encodings -------------------------------------------------------------------------------------------


def numbers(
    block: Block | None, *, scale: str = "weight_scale", integers: bool = False, zero_point: bool = False
) -> Encoding:
    """Return the encoding for 8-bit values, which are e4m3 or integers.

    Args:
        block: The numbers of rows and columns that share a scale, or None for one scale per matrix or per row.
        scale: The name of the scale.
        integers: Whether the values are integers.
        zero_point: Whether there are zero points.
    """
    parts = ("weight", scale, *(["weight_zero_point"] if zero_point else []))

    def spread_scale(tensors: Parts) -> torch.Tensor:
        found = _scale(tensors[scale])
        if not integers and not found.is_meta and bool((found < 0).any()):
            raise EncodingError("has scales below 0")
        return _spread(found, tensors["weight"].shape, block)

    def decode(tensors: Parts) -> torch.Tensor:
        stored = _matrix(tensors["weight"])
        values = stored.float()
        if zero_point:
            values = values - _spread(tensors["weight_zero_point"].float(), stored.shape, block)
        return values * spread_scale(tensors)

    def rows(tensors: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        stored = _matrix(tensors["weight"])
        spread = spread_scale(tensors)
        if spread.shape[1] == 1:
            return stored, spread.expand(stored.shape[0], 1)
        values = stored.float() * spread
        row_scale = (values.abs().amax(1, keepdim=True) / E4M3).clamp_min(torch.finfo(torch.float32).tiny)
        return (values / row_scale).to(torch.float8_e4m3fn), row_scale

    return Encoding(parts=parts, decode=decode, rows=None if integers else rows)


def packed_integers(bits: int, block: Block, *, zero_point: bool, reordered: bool) -> Encoding:
    """Return the encoding for integers in compressed-tensors, which are packed into words by row.

    If `reordered` is set, an additional tensor contains the group index of each column.
    """
    more = [*(["weight_zero_point"] if zero_point else []), *(["weight_g_idx"] if reordered else [])]

    def read(tensors: Parts) -> Grouped:
        values_NK = _unpacked(_matrix(tensors["weight_packed"]), bits, dim=1)
        num_outputs, num_inputs = values_NK.shape
        scales_NG = _scale(tensors["weight_scale"])
        if reordered:
            groups_K = _groups(tensors["weight_g_idx"], num_inputs, _matrix(scales_NG).shape[1])
        else:
            size = block[1] if block[1] > 0 else num_inputs
            groups_K = torch.arange(num_inputs, device=values_NK.device) // size
            shape_NG = torch.Size((num_outputs, -(-num_inputs // size)))
            scales_NG = _spread(scales_NG, shape_NG, TENSOR if block == TENSOR else (1, 1)).expand(shape_NG)
        if zero_point:
            zeros_NG = _unpacked(_matrix(tensors["weight_zero_point"]), bits, dim=0)
            zeros_NG = zeros_NG[:num_outputs]  # the last word may be only partly used
        else:
            zeros_NG = torch.full_like(scales_NG, 1 << (bits - 1), dtype=torch.int32)
        return Grouped(values_NK.t(), scales_NG.t(), zeros_NG.t(), groups_K)

    size_if_ordered = None if reordered else block[1]
    return _integers(("weight_packed", "weight_scale", *more), read, size_if_ordered)


def gptq(*, size: int | None, reordered: bool, zero_offset: int) -> Encoding:
    """Return the encoding for GPTQ.

    Args:
        size: The number of inputs per group, -1 for all inputs, or None if the format does not specify it.
        reordered: Whether an additional tensor contains the group index of each input.
        zero_offset: The number to add to stored zero points.
    """

    def read(tensors: Parts) -> Grouped:
        scales_GN = _scale(tensors["scales"])
        bits = _bits(_matrix(tensors["qzeros"]).shape[1], scales_GN.shape[1])
        values_KN = _unpacked(_matrix(tensors["qweight"]), bits, dim=0)
        zeros_GN = _unpacked(tensors["qzeros"], bits, dim=1) + zero_offset
        if reordered:
            groups_K = _groups(tensors["g_idx"], values_KN.shape[0], scales_GN.shape[0])
        else:
            groups_K = _groups_in_order(size, values_KN, scales_GN)
        return Grouped(values_KN, scales_GN, zeros_GN, groups_K)

    parts = ("qweight", "qzeros", "scales", *(["g_idx"] if reordered else []))
    return _integers(parts, read, None if reordered else size)


def awq(size: int | None) -> Encoding:
    """Return the encoding for AWQ. `size` has the same meaning as in `gptq`."""

    def read(tensors: Parts) -> Grouped:
        scales_GN = _scale(tensors["scales"])
        values_KN, zeros_GN = (_awq_columns(_matrix(tensors[part])) for part in ("qweight", "qzeros"))
        return Grouped(values_KN, scales_GN, zeros_GN, _groups_in_order(size, values_KN, scales_GN))

    return _integers(("qweight", "qzeros", "scales"), read, size)


def _integers(parts: tuple[str, ...], read: Callable[[Parts], Grouped], size: int | None) -> Encoding:
    """Return the encoding for grouped integers. `size` is None if unknown or if groups are not in input order."""

    def grouped(tensors: Parts) -> Grouped:
        found = read(tensors)
        expected = [found.scales_GN.shape[0], found.values_KN.shape[1]]
        _same(found.scales_GN.shape, expected)
        _same(found.zeros_GN.shape, expected)
        return found

    return Encoding(
        parts=parts,
        decode=lambda tensors: grouped(tensors).weight(),
        grouped=grouped if size is not None and size > 0 else None,
        group_size=size or 0,
    )


def fp4(size: int, *, codes: str, whole: str | None = None, divides: bool = False) -> Encoding:
    """Return the encoding for e2m1 values, two per byte, with one scale per `size` values in a row.

    Args:
        size: The number of values in a row that share a scale.
        codes: The name of the tensor that contains the values.
        whole: The name of an additional scale for the whole tensor, or None.
        divides: Whether the other scales are divided by the additional scale instead of multiplied.
    """

    def decode(tensors: Parts) -> torch.Tensor:
        values = _fp4_values(_matrix(tensors[codes]))
        scale = _scale(tensors["weight_scale"])
        if whole is not None:
            of_all = _spread(tensors[whole].float(), values.shape, TENSOR)
            scale = scale / of_all if divides else scale * of_all
        return values * _spread(scale, values.shape, (1, size))

    parts = (codes, "weight_scale", *([whole] if whole is not None else []))
    return Encoding(parts=parts, decode=decode)


def stacked_fp4() -> Encoding:
    """Return the encoding for gpt-oss, which stores all experts of a layer in blocks of 32 e2m1 values with an
    exponent.

    The decoded weight is [experts, inputs, outputs], as in a bfloat16 checkpoint.
    """

    def decode(tensors: Parts) -> torch.Tensor:
        blocks_ENGH, scales_ENG = tensors["blocks"], tensors["scales"]
        if blocks_ENGH.dim() != 4:
            raise EncodingError(
                f"has {blocks_ENGH.dim()}-dimensional blocks, but only 4 dimensions are supported", remedy=OTHER_MODEL
            )
        _same(scales_ENG.shape, blocks_ENGH.shape[:-1])
        experts, outputs, groups, half = blocks_ENGH.shape
        shape = experts, groups * 2 * half, outputs
        # Decode experts one by one, because all experts of a layer can take 8 GiB in float32. The conversion to
        # bfloat16 is exact.
        weight_EKN = torch.empty(shape, dtype=torch.bfloat16, device=blocks_ENGH.device)
        for expert in range(experts):
            values_NK = _fp4_values(blocks_ENGH[expert].flatten(1))
            scale_NK = _scale(scales_ENG[expert]).repeat_interleave(2 * half, 1)
            weight_EKN[expert] = (values_NK * scale_NK).t()
        return weight_EKN

    return Encoding(parts=("blocks", "scales"), decode=decode)


# ---- arithmetic ------------------------------------------------------------------------------------------


def _scale(stored: torch.Tensor) -> torch.Tensor:
    """Return scales as float32. Scales stored as bytes are exponents of two (e8m0), and the highest byte represents
    NaN."""
    if stored.dtype != torch.uint8:
        return stored.float()
    exponents = stored.float() - 127
    return torch.where(stored == 255, torch.nan, exponents.exp2())


def _fp4_values(bytes_NH: torch.Tensor) -> torch.Tensor:
    """Return e2m1 values as float32 [N, 2 * H]. The lower half of each byte is the first value."""
    low_high = torch.stack((bytes_NH & 15, bytes_NH >> 4), dim=-1).flatten(1).long()
    table = torch.tensor(FP4, device=bytes_NH.device)
    return torch.cat((table, -table))[low_high]


def _spread(scale: torch.Tensor, shape: torch.Size, block: Block | None) -> torch.Tensor:
    """Repeat the scales of blocks, so that they broadcast with a matrix of the given shape."""
    if scale.numel() == 1 and block in (None, TENSOR):
        return scale.reshape(1, 1)
    sizes = [all_of if size < 0 else size for size, all_of in zip(block or CHANNEL, shape, strict=True)]
    expected = [-(-all_of // size) for size, all_of in zip(sizes, shape, strict=True)]
    if scale.dim() == 1 and expected[1] == 1:
        scale = scale.unsqueeze(1)
    _same(scale.shape, expected)
    for dim, (size, all_of) in enumerate(zip(sizes, shape, strict=True)):
        if size > 1 and expected[dim] > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, all_of)
    return scale


def _same(shape: torch.Size, expected: torch.Size | list[int]) -> None:
    if list(shape) != list(expected):
        raise EncodingError(f"has scales or zero points of shape {list(shape)}, but its weight needs {list(expected)}")


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 2:
        raise EncodingError(
            f"has quantized values of {tensor.dim()} dimensions, but only matrices are supported", remedy=OTHER_MODEL
        )
    return tensor


def _groups_in_order(size: int | None, values_KN: torch.Tensor, scales_GN: torch.Tensor) -> torch.Tensor:
    """Return the index of each input's group, for groups of consecutive inputs."""
    (num_inputs, num_outputs), num_groups = values_KN.shape, scales_GN.shape[0]
    if size is None:
        if num_groups == 0 or num_inputs % num_groups:
            raise EncodingError(
                f"has {num_groups} groups of {num_inputs} inputs, and config.json has no group_size",
                remedy=OTHER_MODEL,
            )
        size = num_inputs // num_groups
    elif size < 0:
        size = num_inputs
    _same(scales_GN.shape, [-(-num_inputs // size), num_outputs])
    return torch.arange(num_inputs, device=values_KN.device) // size


def _groups(indices: torch.Tensor, num_inputs: int, num_groups: int) -> torch.Tensor:
    if indices.shape != (num_inputs,):
        raise EncodingError(f"has {indices.numel()} group indices for {num_inputs} inputs")
    if not indices.is_meta and not bool(((indices >= 0) & (indices < num_groups)).all()):
        raise EncodingError(f"has group indices outside of its {num_groups} groups")
    return indices.long()


def _bits(words: int, values: int) -> int:
    """Return the number of bits per integer, given the numbers of words and values."""
    in_word = values // words if words else 0
    if in_word not in (4, 8) or words * in_word != values:
        raise EncodingError(f"packs {values} values into {words} words; only integers of 4 or 8 bits are supported")
    return 32 // in_word


def _unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack words along `dim` into unsigned int32 values, starting at the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    shape = [1, 1, 1]
    shape[dim + 1] = len(shifts)
    values = (words.unsqueeze(dim + 1) >> shifts.reshape(shape)) & ((1 << bits) - 1)
    return values.flatten(dim, dim + 1)


def _words(found: Grouped) -> Words:
    return Words(_packed(found.values_KN), found.scales_GN, _packed(found.zeros_GN))


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Pack every eight consecutive 4-bit values in a row into one int32 word."""
    if not values.is_meta and bool((values > 15).any()):
        raise EncodingError("has values or zero points beyond the 4 bits that config.json specifies")
    in_words = values.unflatten(1, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    return (in_words << shifts).sum(-1, dtype=torch.int32)  # the bits do not overlap, so the sum equals a bitwise or


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    values = _unpacked(words, 4, dim=1).unflatten(1, (-1, 8))
    return values[..., list(AWQ_COLUMNS)].flatten(1)
