"""The NPU's fused attention over paged KV, for prompt chunks, decodes and verify steps alike.

A mask holds which keys a query sees; it is made on the device once for all layers of a kind. The lengths that the
operation takes on the host are bounds, after which it reads nothing. Its compressed masks (layout TND, sparse modes 3
and 4) would need exact lengths, which the host knows only after it waited for the step before.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.devices.ascend.graphs import Bounds, HostLengthsOperation, NpuCaptures
from vllm_gaudi_spec.devices.common.kv_pair import KVPair

# What the operation's documentation allows with paged KV, in layout BSND.
_BLOCK_SIZES = range(128, 513, 128)
_MOST_HEAD_SIZE = 512
_MOST_GROUP = 64
_MOST_HEADS = 256
_MOST_KV_WIDTH = 65535
_MOST_KEYS_OF_ONE_QUERY = 262_144
_EVERYTHING = 2**31 - 1
# In the error of a call that CANN does not take.
_REFUSED = "aclnnFusedInferAttentionScore"
# It makes a difference to padding alone: after a window, or after a bound, a query of it may see no key at all. It
# comes out zero.
_CORRECTS_EMPTY_ROWS = 2


def fused_operation(torch_npu: Any) -> HostLengthsOperation | None:
    """None on builds that do not have it."""
    attention = getattr(torch_npu, "npu_fused_infer_attention_score", None)
    workspace = getattr(torch_npu, "_npu_fused_infer_attention_score_get_max_workspace", None)
    if attention is None or workspace is None:
        return None
    return HostLengthsOperation(attention.out, workspace, "actual_seq_lengths_kv")


def takes_blocks(block_size: int) -> bool:
    return block_size in _BLOCK_SIZES


def takes(spec: AttentionLayerSpec, num_queries: int, num_keys: int, dtypes: frozenset[torch.dtype]) -> bool:
    """Whether the operation takes this layer over tables of so many keys. A latent key is its own value, which it has
    no form for; sinks are an argument of its second version alone (`learnable_sink`), in another layout."""
    return (
        spec.dtype in dtypes
        and spec.value_size is None
        and not spec.layer_operations
        and spec.has_plain_scores
        and takes_blocks(spec.block_size)
        and spec.num_heads <= _MOST_HEADS
        and (num_queries > 1 or num_keys <= _MOST_KEYS_OF_ONE_QUERY)
        and spec.head_size % 16 == 0
        and spec.head_size <= _MOST_HEAD_SIZE
        and spec.num_heads // spec.num_kv_heads <= _MOST_GROUP
        and spec.num_kv_heads * spec.head_size <= _MOST_KV_WIDTH
    )


def attend(
    fused: HostLengthsOperation,
    captures: NpuCaptures,
    query_THD: torch.Tensor,
    kv_cache: KVPair,
    call: AttentionCall,
    spec: AttentionLayerSpec,
    *,
    adds_up_blocks: bool,
) -> torch.Tensor:
    """`adds_up_blocks`: as `adds_up_blocks` below found it."""
    assert call.host_lengths_B is not None, "the runner knows how long rows may be"
    keys, values = kv_cache.blocks()
    assert values is not None
    rectangle = call.num_rows, call.num_queries, spec.num_heads, spec.head_size
    query = query_THD.contiguous().view(rectangle)
    mask = call.plan(("hidden", spec.mask_key), lambda: ~padded.visible(call, spec)[:, None])
    arguments = dict(
        key=keys.flatten(2),
        value=values.flatten(2),
        input_layout="BSND",
        block_size=spec.block_size,
        num_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        scale=spec.scale,
        sparse_mode=0,
        # The mask holds all. Under other defaults keys after the first 512 would not be read (an open report).
        pre_tokens=_EVERYTHING,
        next_tokens=_EVERYTHING,
        inner_precise=_CORRECTS_EMPTY_ROWS if call.num_queries > 1 else 0,
    )
    num_blocks = keys.shape[0]
    out_THD = query_THD.new_empty(query_THD.shape)
    out_BQHD, sums = out_THD.view(rectangle), _no_sums(out_THD)
    for bounds in call.plan(
        ("bounds", spec.block_size, num_blocks), lambda: _bounds(call, spec, num_blocks, adds_up_blocks)
    ):
        rows = bounds.rows
        parts = dict(query=query[rows], atten_mask=mask[rows], block_table=call.block_table_BW[rows])
        captures.issue(fused, arguments | parts, bounds, [out_BQHD[rows], sums])
    return out_THD


def _bounds(call: AttentionCall, spec: AttentionLayerSpec, num_blocks: int, adds_up_blocks: bool) -> list[Bounds]:
    """For each run of the operation: all rows in one, or as few rows as cannot have too many blocks together."""
    assert call.host_lengths_B is not None
    width = call.block_table_BW.shape[1]
    longest = width * spec.block_size
    at_once = call.num_rows
    if adds_up_blocks:
        # No row's queries see more keys than there are blocks for.
        longest = min(longest, num_blocks * spec.block_size)
        at_once = min(at_once, max(num_blocks // width, 1))
    starts = range(0, call.num_rows, at_once)
    return [Bounds(call.host_lengths_B, slice(start, start + at_once), spec.block_size, longest) for start in starts]


def adds_up_blocks(torch_npu: Any, device: torch.device, num_queries: int) -> bool:
    """Whether the operation refuses rows that have more blocks together than there are, as rows do that share a prefix.

    Its page does. The sources of CANN 8.5 check it for several queries a row, and in those of 2026 no check was found.
    So the card is asked: two rows of the one block that there is.
    """
    query = torch.zeros(2, num_queries, 1, 128, dtype=torch.float16, device=device)
    keys = torch.zeros(1, 128, 128, dtype=torch.float16, device=device)
    try:
        torch_npu.npu_fused_infer_attention_score(
            query,
            keys,
            keys,
            block_table=torch.zeros(2, 1, dtype=torch.int32, device=device),
            actual_seq_lengths_kv=[128, 128],
            input_layout="BSND",
            block_size=128,
            num_heads=1,
            num_key_value_heads=1,
            pre_tokens=_EVERYTHING,
            next_tokens=_EVERYTHING,
        )
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        return True
    return False


def num_keys(call: AttentionCall, spec: AttentionLayerSpec) -> int:
    """For which there is room in each row's table."""
    return call.block_table_BW.shape[1] * spec.block_size


def _no_sums(out: torch.Tensor) -> torch.Tensor:
    """The operation's second result, which nobody asked for."""
    return torch.empty(1, dtype=torch.float32, device=out.device)
