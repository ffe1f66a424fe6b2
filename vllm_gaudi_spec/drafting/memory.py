"""Memory that drafting needs in addition to weights and the KV cache, and the drafter KV region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_gaudi_spec.step_inputs import HostBlocks, make_host_lengths
from vllm_gaudi_spec.upstream.kv_cache import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

if TYPE_CHECKING:
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheSpec

NO_ROOM_FOR_KV = (
    "drafting or recurrent states leave no memory for the KV cache; lower --max-num-seqs, num_speculative_tokens in "
    "--speculative-config, or universal_kv_len or state_snapshots in additional_config.gaudi_spec."
)
_FLOAT32_BYTES = 4


def count_distributions(speculation: Speculation, max_rows: int) -> int:
    """Return the number of draft distributions to store for all rows, including the pad row."""
    return (max_rows + 1) * speculation.num_drafts


def count_region_blocks(max_rows: int, length: int, block_size: int) -> int:
    """Return the number of blocks in a drafter KV region for all rows, including the pad block."""
    return 1 + max_rows * -(-length // block_size)


class KVBlock(NamedTuple):
    """Size of one KV block of the drafter, summed over all layers."""

    num_tokens: int
    num_bytes: int


def compute_drafting_bytes(
    speculation: Speculation, max_rows: int, vocab_size: int, region_block: KVBlock | None
) -> dict[str, int]:
    """Return the bytes that drafting needs, by purpose. `region_block` is None if the drafter has no KV region."""
    found = {}
    if speculation.keeps_probs:
        num_bytes = _FLOAT32_BYTES * count_distributions(speculation, max_rows) * vocab_size
        found["the float32 distributions of drafts: sequences x drafts x vocabulary"] = num_bytes
    if region_block is not None:
        length = speculation.universal_kv_len
        num_blocks = count_region_blocks(max_rows, length, region_block.num_tokens)
        name = f"the drafter's KV: sequences x {length} tokens (universal_kv_len)"
        found[name] = num_blocks * region_block.num_bytes
    return found


class DrafterKVRegion:
    """KV storage for a drafter that numbers positions itself. Each row has a fixed range of blocks.

    This KV cannot be stored in the target's blocks: their positions are those of target tokens, and vLLM shares them
    between requests that have the same target tokens.
    """

    def __init__(
        self, model: LoadedModel, backend: DeviceBackend, num_rows: int, length: int, max_context: int
    ) -> None:
        """Allocate `length` tokens per row. Block tables cover `max_context` tokens, which padding may reach."""
        specs = model.kv_cache_spec()
        self.length = length
        self._size, block_bytes = get_kv_block(specs)
        self._backend = backend
        num_blocks = count_region_blocks(num_rows, length, self._size)
        self._allocate(model, specs, num_blocks, block_bytes)
        width = -(-length // self._size)
        self._table_np = np.zeros((num_rows + 1, -(-max_context // self._size)), dtype=np.int32)
        # Block 0 is the pad block, and the last row is the pad row.
        self._table_np[:num_rows, :width] = 1 + np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)

    def _allocate(self, model: LoadedModel, specs: dict[str, KVCacheSpec], num_blocks: int, block_bytes: int) -> None:
        total, tensors = num_blocks * block_bytes, []
        offset = 0
        for name, spec in specs.items():
            page = spec.page_size_bytes
            tensors.append(KVCacheTensor(total, [name], page * num_blocks, page, offset))
            offset += page * num_blocks
        groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
        config = model.vllm_config
        by_layer = self._backend.memory.allocate_kv(
            KVCacheConfig(num_blocks, tensors, groups), config.cache_config.get_resolved_kv_cache_layout()
        )
        model.bind_kv(by_layer, [list(specs)])

    def blocks(self, rows_np: np.ndarray, ends: Sequence[int], context: int) -> HostBlocks:
        """Return block tables that cover `context` tokens. `ends` contains the end positions of the first rows."""
        table_np = self._table_np[rows_np, : -(-context // self._size)]
        needs_lengths = self._backend.traits.needs_host_lengths
        lengths_B = make_host_lengths(len(rows_np), ends, context) if needs_lengths else None
        return HostBlocks((table_np,), (self._size,), lengths_B=lengths_B)


def get_kv_block(specs: dict[str, KVCacheSpec]) -> KVBlock:
    sizes = {spec.block_size for spec in specs.values() if isinstance(spec, AttentionSpec)}
    assert len(sizes) == 1, "a drafter's layers must have one block size"
    return KVBlock(sizes.pop(), sum(spec.page_size_bytes for spec in specs.values()))
