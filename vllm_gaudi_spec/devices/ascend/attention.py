"""The NPU's fused attention over paged KV for prompt chunks, decodes, and verify steps.

The host knows the lengths of all prompt chunks. They use the TND layout with exact lengths and one small mask, either
causal or windowed. The lengths of decodes are known only after the previous step, so decodes use a mask that the device
computes, and the host provides only upper bounds on the number of keys to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.devices.ascend.graphs import HostLengths, HostLengthsOperation, NpuCaptures
from vllm_gaudi_spec.devices.common.kv_pair import KVPair

# The operator's documented limits for paged KV in the BSND layout.
_BLOCK_SIZES = range(128, 513, 128)
_MAX_HEAD_SIZE = 512
_MAX_GROUP = 64
_MAX_HEADS = 256
_MAX_KV_WIDTH = 65535
_MAX_KEYS_OF_ONE_QUERY = 262_144
# The limit for the TND layout. vllm-ascend excludes size 512 on these cards. `compresses_masks` tests smaller sizes.
_MAX_COMPRESSED_HEAD_SIZE = 256
_COMPRESSED_MASK = 2048
_CAUSAL, _WINDOW = 3, 4
"""Values of `sparse_mode`. In both modes, each row's last query is aligned with its last key."""
_EVERYTHING = 2**31 - 1
# The part of CANN's error message that identifies an unsupported call.
_REFUSED = "aclnnFusedInferAttentionScore"
# A value of `inner_precise` that makes the result zero for queries without visible keys. Only padding has such queries.
_CORRECTS_EMPTY_ROWS = 2
# The value of `inner_precise` that vllm-ascend uses with compressed masks. Other values select a different kernel for
# grouped heads of size 64, 128, or 192 (CANN 9.1.0, CheckSpecConditions in fused_infer_attention_score_tiling_v3.cpp).
_AS_OTHERS = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds on the number of keys in each decode row."""

    lengths_B: torch.Tensor
    """An argument of the captured graph that is in host memory."""
    rows: slice
    step: int
    """Bounds are rounded up to multiples of this number, so that most steps do not change them."""
    longest: int
    """The largest possible bound."""

    def get_current_arguments(self) -> dict[str, list[int]]:
        lengths = self.lengths_B[self.rows].tolist()
        return {"actual_seq_lengths_kv": [min(-(-length // self.step) * self.step, self.longest) for length in lengths]}

    def get_longest_arguments(self) -> dict[str, list[int]]:
        return {"actual_seq_lengths_kv": [self.longest] * len(self.lengths_B[self.rows])}


@dataclass(frozen=True, slots=True)
class ChunkLengths:
    """The numbers of queries and keys in each prompt chunk.

    Each chunk is followed by a row for its padding, because the operator requires every query to belong to a row. Like
    the row that vllm-ascend adds (attention_v1.py at 182b75ea84), the padding row has a single key. The documentation
    requires at least as many keys as queries, but they might need more KV blocks than there are.
    """

    lengths_B: torch.Tensor
    counts_B: torch.Tensor
    """Arguments of the captured graph that are in host memory."""
    rows: slice
    num_queries: int
    """The number of queries per row, including padding."""
    longest: int

    def get_current_arguments(self) -> dict[str, list[int]]:
        return self._of(self.counts_B[self.rows].tolist(), self.lengths_B[self.rows].tolist())

    def get_longest_arguments(self) -> dict[str, list[int]]:
        rows = len(self.lengths_B[self.rows])
        # The workspace grows with the number of queries, which is the same in every call.
        return self._of([self.num_queries] * rows, [self.longest] * rows)

    def _of(self, counts: list[int], lengths: list[int]) -> dict[str, list[int]]:
        ends, keys = [], []
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            start = row * self.num_queries
            ends += [start + count, start + self.num_queries]
            keys += [length, 1]
        return {"actual_seq_lengths": ends, "actual_seq_lengths_kv": keys}


def fused_operation(torch_npu: Any) -> HostLengthsOperation | None:
    """Return the fused operator, or None if this build lacks it."""
    attention = getattr(torch_npu, "npu_fused_infer_attention_score", None)
    workspace = getattr(torch_npu, "_npu_fused_infer_attention_score_get_max_workspace", None)
    if attention is None or workspace is None:
        return None
    return HostLengthsOperation(attention.out, workspace)


def takes_blocks(block_size: int) -> bool:
    return block_size in _BLOCK_SIZES


def takes(spec: AttentionLayerSpec, num_queries: int, num_keys: int, dtypes: frozenset[torch.dtype]) -> bool:
    """Whether the operator supports this layer over block tables that cover `num_keys` keys.

    It does not support latent keys, which also serve as values. Sinks (`learnable_sink`) are supported only by the
    operator's second version, which expects a different layout.
    """
    return (
        spec.dtype in dtypes
        and spec.value_size is None
        and not spec.layer_operations
        and spec.has_plain_scores
        and takes_blocks(spec.block_size)
        and spec.num_heads <= _MAX_HEADS
        and (num_queries > 1 or num_keys <= _MAX_KEYS_OF_ONE_QUERY)
        and spec.head_size % 16 == 0
        and spec.head_size <= _MAX_HEAD_SIZE
        and spec.num_heads // spec.num_kv_heads <= _MAX_GROUP
        and spec.num_kv_heads * spec.head_size <= _MAX_KV_WIDTH
    )


def takes_compressed_masks(spec: AttentionLayerSpec, call: AttentionCall) -> bool:
    """Whether the call contains only prompt chunks and its mask is purely causal or windowed."""
    return (
        call.host_counts_B is not None
        and call.num_queries > 1
        and spec.is_causal
        and spec.attention_chunk is None
        and call.spans is None
        and spec.head_size <= _MAX_COMPRESSED_HEAD_SIZE
    )


def compressed_mask(device: torch.device) -> torch.Tensor:
    """Return the int8 mask from which the operator derives causal masks of any size."""
    return torch.ones(_COMPRESSED_MASK, _COMPRESSED_MASK, dtype=torch.int8, device=device).triu(1)


class _Part(NamedTuple):
    arguments: dict[str, Any]
    lengths: HostLengths
    out: torch.Tensor


def attend(
    fused: HostLengthsOperation,
    captures: NpuCaptures,
    query_THD: torch.Tensor,
    kv_cache: KVPair,
    call: AttentionCall,
    spec: AttentionLayerSpec,
    *,
    adds_up_blocks: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with the fused operator.

    Args:
        adds_up_blocks: Whether the operator rejects rows that together have more KV blocks than the cache.
        mask: The compressed mask, or None to use a dense mask.
    """
    keys, values = kv_cache.blocks()
    assert values is not None
    shared = dict(
        key=keys.flatten(2),
        value=values.flatten(2),
        block_size=spec.block_size,
        num_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        scale=spec.scale,
    )
    query_THD, out_THD = query_THD.contiguous(), query_THD.new_empty(query_THD.shape)
    if mask is None:
        parts = _split_under_dense_mask(query_THD, out_THD, call, spec, keys.shape[0], adds_up_blocks)
    else:
        parts = _split_under_compressed_mask(query_THD, out_THD, call, spec, mask, keys.shape[0], adds_up_blocks)
    sums = torch.empty(1, dtype=torch.float32, device=out_THD.device)  # the second result, which is unused
    for part in parts:
        captures.issue(fused, shared | part.arguments, part.lengths, [part.out, sums])
    return out_THD


def _split_under_dense_mask(
    query_THD: torch.Tensor,
    out_THD: torch.Tensor,
    call: AttentionCall,
    spec: AttentionLayerSpec,
    num_blocks: int,
    adds_up_blocks: bool,
) -> Iterator[_Part]:
    rectangle = call.num_rows, call.num_queries, spec.num_heads, spec.head_size
    query, out = query_THD.view(rectangle), out_THD.view(rectangle)
    mask = call.plan(("hidden", spec.mask_key), lambda: ~padded.find_visible(call, spec)[:, None])
    for bounds in call.plan(
        ("bounds", spec.block_size, num_blocks), lambda: _make_bounds(call, spec, num_blocks, adds_up_blocks)
    ):
        arguments = dict(
            query=query[bounds.rows],
            atten_mask=mask[bounds.rows],
            block_table=call.block_table_BW[bounds.rows],
            input_layout="BSND",
            inner_precise=_CORRECTS_EMPTY_ROWS if call.num_queries > 1 else 0,
            sparse_mode=0,
            # Let the mask alone determine the visible keys. By default, the operator would ignore keys after the first
            # 512 (vllm-ascend#15503).
            pre_tokens=_EVERYTHING,
            next_tokens=_EVERYTHING,
        )
        yield _Part(arguments, bounds, out[bounds.rows])


def _split_under_compressed_mask(
    query_THD: torch.Tensor,
    out_THD: torch.Tensor,
    call: AttentionCall,
    spec: AttentionLayerSpec,
    mask: torch.Tensor,
    num_blocks: int,
    adds_up_blocks: bool,
) -> Iterator[_Part]:
    queries = call.num_queries
    # Each chunk takes two rows: one for the chunk and one for its padding.
    table = call.plan("twice", lambda: torch.stack([call.block_table_BW] * 2, 1).flatten(0, 1))
    for lengths in call.plan(
        ("chunks", spec.block_size, num_blocks), lambda: _make_chunk_lengths(call, spec, num_blocks, adds_up_blocks)
    ):
        rows = lengths.rows
        tokens = slice(rows.start * queries, rows.stop * queries)
        arguments = dict(
            query=query_THD[tokens],
            atten_mask=mask,
            block_table=table[2 * rows.start : 2 * rows.stop],
            **_build_chunk_arguments(spec.sliding_window),
        )
        yield _Part(arguments, lengths, out_THD[tokens])


def _make_bounds(call: AttentionCall, spec: AttentionLayerSpec, num_blocks: int, adds_up_blocks: bool) -> list[Bounds]:
    assert call.host_lengths_B is not None, "the runner knows how long rows may be"
    longest, parts = _split_rows(call, spec, num_blocks, adds_up_blocks, of_padding=0)
    return [Bounds(call.host_lengths_B, rows, spec.block_size, longest) for rows in parts]


def _make_chunk_lengths(
    call: AttentionCall, spec: AttentionLayerSpec, num_blocks: int, adds_up_blocks: bool
) -> list[ChunkLengths]:
    assert call.host_lengths_B is not None
    assert call.host_counts_B is not None
    longest, parts = _split_rows(call, spec, num_blocks, adds_up_blocks, of_padding=1)
    return [ChunkLengths(call.host_lengths_B, call.host_counts_B, rows, call.num_queries, longest) for rows in parts]


def _split_rows(
    call: AttentionCall, spec: AttentionLayerSpec, num_blocks: int, adds_up_blocks: bool, of_padding: int
) -> tuple[int, list[slice]]:
    """Return the maximum number of keys per row, and the rows to process in each run of the operator.

    If `adds_up_blocks` is set, the rows in a run together have at most as many KV blocks as the cache. This includes
    `of_padding` additional blocks for each row.
    """
    width = call.block_table_BW.shape[1]
    longest = width * spec.block_size
    at_once = call.num_rows
    if adds_up_blocks:
        # The keys of a row always fit in the blocks of the cache.
        longest = min(longest, (num_blocks - of_padding) * spec.block_size)
        at_once = min(at_once, max(num_blocks // (width + of_padding), 1))
    starts = range(0, call.num_rows, at_once)
    return longest, [slice(start, min(start + at_once, call.num_rows)) for start in starts]


def adds_up_blocks(
    torch_npu: Any, device: torch.device, spec: AttentionLayerSpec, num_queries: int, mask: torch.Tensor | None = None
) -> bool:
    """Whether the operator rejects rows that together have more KV blocks than the cache.

    Rows that share a prefix may have more. According to the documentation, the operator rejects such rows. In CANN
    8.5.0, one kernel does, for several queries per row and some head sizes. CANN 9.0.0 and 9.1.0 do not. This function
    therefore tries a call with two rows that share a block on the card. `mask` is the compressed mask, or None.
    """
    query = torch.zeros(2, num_queries, spec.num_heads, spec.head_size, dtype=spec.dtype, device=device)
    form: dict[str, Any] = dict(input_layout="BSND", pre_tokens=_EVERYTHING, next_tokens=_EVERYTHING)
    if mask is not None:
        query = query.flatten(0, 1)
        lengths = [num_queries, 2 * num_queries]
        form = dict(atten_mask=mask, actual_seq_lengths=lengths, **_build_chunk_arguments(None))
    block = spec.block_size
    keys = torch.zeros(1, block, spec.num_kv_heads * spec.head_size, dtype=spec.dtype, device=device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    form |= dict(block_table=table, actual_seq_lengths_kv=[block, block], block_size=block)
    form |= dict(num_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads)
    return _refuses(torch_npu, query, keys, **form)


def compresses_masks(torch_npu: Any, device: torch.device, spec: AttentionLayerSpec, mask: torch.Tensor) -> bool:
    """Whether the operator supports prompt chunks in the TND layout for this kind of layer.

    The documentation lists head sizes 128 and 192, and CANN 9.1.0 supports all sizes up to 256. In CANN 8.5.0, support
    depends on the kernel, which is selected by heads, groups, window, and blocks. One kernel supports only bfloat16 and
    rejects rows with more queries than keys, such as padding (CheckSpecConditions, CheckInputShapeWhenLayoutIsTND).
    Users reported that cards rejected sizes 256 (vllm-ascend#9632) and 96 (vllm-ascend's MiniCPM3 page). This function
    therefore tries a one-query chunk with padding on the card.
    """
    query = torch.zeros(4, spec.num_heads, spec.head_size, dtype=spec.dtype, device=device)
    keys = torch.zeros(2, spec.block_size, spec.num_kv_heads * spec.head_size, dtype=spec.dtype, device=device)
    return not _refuses(
        torch_npu,
        query,
        keys,
        atten_mask=mask,
        actual_seq_lengths=[1, 4],
        actual_seq_lengths_kv=[spec.block_size, 1],
        block_table=torch.arange(2, dtype=torch.int32, device=device).unsqueeze(1),
        block_size=spec.block_size,
        num_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        **_build_chunk_arguments(spec.sliding_window),
    )


def _refuses(torch_npu: Any, query: torch.Tensor, keys: torch.Tensor, **form: Any) -> bool:
    try:
        torch_npu.npu_fused_infer_attention_score(query, keys, keys, **form)
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        return True
    return False


def _build_chunk_arguments(window: int | None) -> dict[str, Any]:
    form: dict[str, Any] = dict(input_layout="TND", inner_precise=_AS_OTHERS)
    if window is None:
        return form | dict(sparse_mode=_CAUSAL, pre_tokens=_EVERYTHING, next_tokens=_EVERYTHING)
    return form | dict(sparse_mode=_WINDOW, pre_tokens=window - 1, next_tokens=0)
