"""npu_fused_infer_attention_score in plain torch, with what its documentation allows and nothing else.

From docs/zh/custom_APIs/torch_npu of Ascend/op-plugin. Left out, and refused: quantised forms, rope as an input of its
own (MLA), shared prefixes, padding on the left, position shifts, and layouts that change between input and output.
One thing is taken that a card does not take: float32, so that what is built on it can be compared number by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_gaudi_spec.emulator.card import DeviceRefusal

_TENSORS = (
    "pse_shift dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset "
    "key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset query_padding_size "
    "kv_padding_size key_shared_prefix value_shared_prefix query_rope key_rope key_rope_antiquant_scale"
)
# All of the real argument list: what is left out here is refused by name.
NOT_EMULATED = (*_TENSORS.split(), "actual_shared_prefix_len")
EVERYTHING = 2147483647
_LAYOUTS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
_COMPRESSED_MASK = 2048

ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? atten_mask=None, int[]? actual_seq_lengths=None, "
    "int[]? actual_seq_lengths_kv=None, Tensor? block_table=None, int num_heads=1, float scale=1.0, "
    f"int pre_tokens={EVERYTHING}, int next_tokens={EVERYTHING}, str input_layout='BSH', int num_key_value_heads=0, "
    "int sparse_mode=0, int inner_precise=0, int block_size=0, bool softmax_lse_flag=False"
)


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise DeviceRefusal(f"aclnnFusedInferAttentionScore: {what}")


@dataclass
class Call:
    """The arguments, checked, and what follows from them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    atten_mask: torch.Tensor | None = None
    actual_seq_lengths: Sequence[int] | None = None
    actual_seq_lengths_kv: Sequence[int] | None = None
    block_table: torch.Tensor | None = None
    num_heads: int = 1
    scale: float = 1.0
    pre_tokens: int = EVERYTHING
    next_tokens: int = EVERYTHING
    input_layout: str = "BSH"
    num_key_value_heads: int = 0
    sparse_mode: int = 0
    inner_precise: int = 0
    block_size: int = 0
    softmax_lse_flag: bool = False

    def __post_init__(self) -> None:
        self.kv_heads = self.num_key_value_heads or self.num_heads
        _require(self.input_layout in _LAYOUTS, f"input_layout {self.input_layout} is not among {sorted(_LAYOUTS)}")
        _require(self.sparse_mode in range(5), f"sparse_mode {self.sparse_mode} is not supported")
        _require(self.inner_precise in range(4), f"inner_precise {self.inner_precise} is not supported")
        _require(not self.softmax_lse_flag, "softmax_lse_flag is not emulated")
        self._check_tensors()
        self._check_heads()
        self.paged = self.block_table is not None
        self.query_lengths, self.key_lengths = self._lengths()
        _require(self.inner_precise < 2 or not self.single, "one query a row: inner_precise is 0 or 1")
        _require(not self.single or max(self.key_lengths, default=0) <= 262144, "one query a row: 262144 keys at most")
        self._check_pages()
        self._check_mask()

    @property
    def single(self) -> bool:
        """Whether it is the form for one query a row, which knows no order among queries and keys."""
        return self.input_layout != "TND" and self.query.shape[2 if self.input_layout == "BNSD" else 1] == 1

    def _check_tensors(self) -> None:
        dtype = self.query.dtype
        _require(dtype in (torch.float16, torch.bfloat16, torch.float32), f"query is {dtype}")
        _require(self.key.dtype == self.value.dtype == dtype, "query, key and value have one dtype")
        for name in ("query", "key", "value", "atten_mask", "block_table"):
            tensor = getattr(self, name)
            _require(tensor is None or tensor.is_contiguous(), f"{name} is not contiguous")
        _require(self.key.shape == self.value.shape, "key and value have one shape")
        num_dims = _LAYOUTS[self.input_layout]
        _require(
            self.query.dim() == num_dims, f"query has {self.query.dim()} dimensions, {self.input_layout} {num_dims}"
        )

    def _check_heads(self) -> None:
        ratio, rest = divmod(self.num_heads, self.kv_heads)
        _require(rest == 0 and ratio <= 64, f"{self.num_heads} query heads over {self.kv_heads} of keys")
        _require(self.num_heads <= 256 and self.kv_heads <= 256, "more than 256 heads")
        query = self.query
        if self.input_layout == "BSH":
            _require(query.shape[2] % self.num_heads == 0, "the hidden size is no multiple of num_heads")
            self.head_size = query.shape[2] // self.num_heads
        else:
            heads = query.shape[1 if self.input_layout in ("BNSD", "TND") else 2]
            _require(heads == self.num_heads, f"query has {heads} heads, num_heads is {self.num_heads}")
            self.head_size = query.shape[-1]
        _require(self.head_size <= 512 and self.head_size % 8 == 0, f"head size {self.head_size}")
        if self.input_layout == "TND":
            _require(self.head_size in (128, 192), f"head size {self.head_size} in layout TND; it takes 128 and 192")

    def _lengths(self) -> tuple[list[int], list[int]]:
        """Of each row, how many queries and how many keys are there."""
        query_lengths, kv_lengths = (_host_list(self, name) for name in ("actual_seq_lengths", "actual_seq_lengths_kv"))
        if self.input_layout == "TND":
            _require(query_lengths is not None and kv_lengths is not None, "TND needs both lists of lengths")
            assert query_lengths is not None
            assert kv_lengths is not None
            _require(len(query_lengths) == len(kv_lengths) <= 4096, "TND: one entry a row in both lists, at most 4096")
            _require(
                bool(query_lengths) and query_lengths[-1] == self.query.shape[0],
                "TND: the last entry is the number of queries",
            )
            queries = _differences(query_lengths)
            if self.paged:
                return queries, kv_lengths
            _require(kv_lengths[-1] == self.key.shape[0], "TND: the last entry is the number of keys")
            return queries, _differences(kv_lengths)
        rows, sequence = self.query.shape[0], self.query.shape[2 if self.input_layout == "BNSD" else 1]
        # With one query a row their lengths are ignored.
        queries = _per_row(query_lengths, rows, sequence, "actual_seq_lengths") if sequence > 1 else [1] * rows
        if self.paged:
            _require(kv_lengths is not None, "paged keys need actual_seq_lengths_kv")
            assert self.block_table is not None
            max_keys = self.block_table.shape[-1] * self.block_size
        else:
            _require(self.key.dim() == self.query.dim(), "keys have the layout of queries unless they are paged")
            max_keys = self.key.shape[2 if self.input_layout == "BNSD" else 1]
        return queries, _per_row(kv_lengths, rows, max_keys, "actual_seq_lengths_kv")

    def _check_pages(self) -> None:
        table = self.block_table
        if table is None:
            return
        _require(table.dtype == torch.int32 and table.dim() == 2, "block_table is a matrix of int32")
        _require(table.shape[0] == len(self.key_lengths), "block_table has a row for each row")
        size = self.block_size
        if max(self.query_lengths, default=1) > 1 and self.input_layout != "TND":
            _require(
                size in (128, 256, 384, 512), f"block_size {size} with several queries a row: 128, 256, 384 or 512"
            )
        else:
            max_block_size = 1024 if self.input_layout == "TND" else 512
            _require(
                0 < size <= max_block_size and size % 16 == 0,
                f"block_size {size} is no multiple of 16 up to {max_block_size}",
            )
        flat, apart = [size, self.kv_heads * self.head_size], [self.kv_heads, size, self.head_size]
        shape = list(self.key.shape[1:])
        if self.input_layout in ("BSH", "BSND"):
            _require(shape == flat, f"in layout {self.input_layout} paged keys are [blocks, {size}, heads * head size]")
        else:
            _require(shape in (flat, apart), f"paged keys are [blocks, {flat}] or [blocks, {apart}], not {shape}")
        max_keys = table.shape[1] * size
        _require(
            max(self.key_lengths, default=0) <= max_keys, f"{max(self.key_lengths)} keys in a table for {max_keys}"
        )
        needed = sum(-(-length // size) for length in self.key_lengths)
        _require(needed <= self.key.shape[0], f"rows of {needed} blocks together, and there are {self.key.shape[0]}")

    def _check_mask(self) -> None:
        mask = self.atten_mask
        if self.sparse_mode in (2, 3, 4):
            side = _COMPRESSED_MASK
            shapes = ([side, side], [1, side, side], [1, 1, side, side])
            _require(
                mask is not None and list(mask.shape) in shapes,
                f"sparse_mode {self.sparse_mode} takes a mask of {side} x {side}",
            )
        _require(mask is not None or self.sparse_mode != 1, "sparse_mode 1 takes a mask")
        if mask is None:
            return
        _require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is {mask.dtype}")
        if self.sparse_mode in (2, 3, 4):
            expected = torch.ones(_COMPRESSED_MASK, _COMPRESSED_MASK, dtype=torch.bool, device=mask.device).triu(1)
            right = mask.is_meta or torch.equal(mask.bool().view_as(expected), expected)
            _require(right, f"the mask of sparse_mode {self.sparse_mode} hides what is above the diagonal")
            return
        _require(self.input_layout != "TND", "TND takes a mask in sparse_mode 3 and 4 only")
        rows, queries = len(self.key_lengths), self.query.shape[2 if self.input_layout == "BNSD" else 1]
        keys = self.key_extent
        shape = list(mask.shape)
        fine = shape[:-1] in ([1, queries], [rows, 1, queries], [1, 1, queries], [rows if queries == 1 else queries])
        _require(fine and shape[-1] >= keys, f"a mask of {shape} for {rows} rows, {queries} queries and {keys} keys")

    @property
    def key_extent(self) -> int:
        """Keys that a row has room for."""
        if self.block_table is not None:
            return int(self.block_table.shape[1]) * self.block_size
        return int(self.key.shape[2 if self.input_layout == "BNSD" else 1])


def _host_list(call: Call, name: str) -> list[int] | None:
    lengths = getattr(call, name)
    if lengths is None:
        return None
    _require(isinstance(lengths, (list, tuple)), f"{name} is a list on the host, not {type(lengths).__name__}")
    _require(
        all(type(length) is int and length >= 0 for length in lengths), f"{name} holds numbers of the host, from 0"
    )
    return list(lengths)


def _differences(ends: list[int]) -> list[int]:
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    _require(all(size >= 0 for size in sizes), "TND: lengths are sums up to each row, which do not fall")
    return sizes


def _per_row(lengths: list[int] | None, rows: int, max_length: int, name: str) -> list[int]:
    if lengths is None:
        return [max_length] * rows
    _require(len(lengths) == 1 or len(lengths) >= rows, f"{name} has {len(lengths)} entries for {rows} rows")
    taken = lengths * rows if len(lengths) == 1 else lengths[:rows]
    _require(
        max(taken, default=0) <= max_length,
        f"{name} is up to {max(taken, default=0)} where there is room for {max_length}",
    )
    return taken


def attend(call: Call) -> torch.Tensor:
    """In float32, row by row; as the layout has it."""
    query = call.query
    if call.input_layout == "BSH":
        query = query.unflatten(2, (call.num_heads, call.head_size))
    out = torch.zeros_like(query)
    if query.is_meta:
        return out.view_as(call.query)
    start = start_kv = 0
    for row, (queries, keys) in enumerate(zip(call.query_lengths, call.key_lengths, strict=True)):
        if call.input_layout == "TND":
            part, target = query[start : start + queries], out[start : start + queries]
        elif call.input_layout == "BNSD":
            part, target = (tensor[row, :, :queries].transpose(0, 1) for tensor in (query, out))
        else:
            part, target = query[row, :queries], out[row, :queries]
        if queries and keys:
            key_SND, value_SND = (_keys_of(call, source, row, start_kv, keys) for source in (call.key, call.value))
            target.copy_(_attend_row(part, key_SND, value_SND, _hidden(call, row, queries, keys), call))
        start, start_kv = start + queries, start_kv + keys
    return out.view_as(call.query)


def _keys_of(call: Call, source: torch.Tensor, row: int, start: int, keys: int) -> torch.Tensor:
    """[keys, kv_heads, head_size]"""
    heads, size = call.kv_heads, call.head_size
    if call.block_table is not None:
        blocks = call.block_table[row, : -(-keys // call.block_size)].long()
        low, high = (int(limit) for limit in blocks.aminmax())
        _require(low >= 0 and high < source.shape[0], f"block {low if low < 0 else high} of {source.shape[0]}")
        taken = source[blocks]
        if taken.dim() == 4:
            taken = taken.transpose(1, 2)
        return taken.reshape(-1, heads, size)[:keys]
    if call.input_layout == "TND":
        return source[start : start + keys]
    if call.input_layout == "BNSD":
        return source[row, :, :keys].transpose(0, 1)
    return source[row, :keys].reshape(keys, heads, size)


def _hidden(call: Call, row: int, queries: int, keys: int) -> torch.Tensor | None:
    """[queries, keys], or None where all is seen."""
    row_of, column = torch.arange(queries)[:, None], torch.arange(keys)
    aligned = row_of + keys - queries
    if call.sparse_mode == 2 and not call.single:
        return column > row_of
    if call.sparse_mode == 3 and not call.single:
        return column > aligned
    if call.sparse_mode == 4 and not call.single:
        return (column > aligned + call.next_tokens) | (column < aligned - call.pre_tokens)
    if call.atten_mask is None or call.sparse_mode > 1:
        return None
    mask = call.atten_mask.bool()
    if mask.dim() == 2 and call.single:
        mask = mask[row if mask.shape[0] > 1 else 0][None]
    elif mask.dim() >= 3:
        mask = mask.view(mask.shape[0], *mask.shape[-2:])[row if mask.shape[0] > 1 else 0]
    hidden = mask[:queries, :keys]
    if call.sparse_mode == 0 and not call.single:
        hidden = hidden | (column > row_of + call.next_tokens) | (column < row_of - call.pre_tokens)
    return hidden


def _attend_row(
    query_QND: torch.Tensor, key_SND: torch.Tensor, value_SND: torch.Tensor, hidden_QS: torch.Tensor | None, call: Call
) -> torch.Tensor:
    """A query that sees nothing sees all alike, unless the correction of such rows was asked for: then it gets zero."""
    group = query_QND.shape[1] // key_SND.shape[1]
    key_NDS = key_SND.float().permute(1, 2, 0)
    value_NSD = value_SND.float().transpose(0, 1)
    scores_NQS = query_QND.float().transpose(0, 1).unflatten(0, (-1, group)) @ key_NDS.unsqueeze(1) * call.scale
    if hidden_QS is not None:
        scores_NQS = scores_NQS.masked_fill(hidden_QS, torch.finfo(torch.float32).min)
    attended_QND = (scores_NQS.softmax(-1) @ value_NSD.unsqueeze(1)).flatten(0, 1).transpose(0, 1)
    if hidden_QS is not None and call.inner_precise >= 2:
        attended_QND = attended_QND.masked_fill(hidden_QS.all(1)[:, None, None], 0.0)
    return attended_QND.to(query_QND.dtype)


def keys_read(kwargs: dict[str, Any]) -> int | None:
    """How many paged keys all rows fetch, in whole blocks; None where they are not paged."""
    table = kwargs.get("block_table")
    if table is None:
        return None
    rows, size = table.shape[0], kwargs["block_size"]
    lengths = kwargs["actual_seq_lengths_kv"]
    return sum(-(-length // size) * size for length in (lengths * rows if len(lengths) == 1 else lengths[:rows]))


def operand_bytes(position: int, args: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> int | None:
    """What is read of an operand; None where that is all of it."""
    if position not in (1, 2):
        return None
    keys, source = keys_read(kwargs), args[position]
    if keys is None:
        return None
    width = source.numel() // (source.shape[0] * kwargs["block_size"])
    return keys * width * source.element_size()


def flops(args: Sequence[torch.Tensor], kwargs: dict[str, Any], out: torch.Tensor) -> int:
    query, key = args[0], args[1]
    keys = keys_read(kwargs)
    if keys is None:
        layout = kwargs.get("input_layout", "BSH")
        return 4 * query.numel() * int(key.shape[{"TND": 0, "BNSD": 2}.get(layout, 1)])
    return 4 * (query.numel() // kwargs["block_table"].shape[0]) * keys
