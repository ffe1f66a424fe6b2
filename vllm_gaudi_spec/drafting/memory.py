"""Memory that drafting takes besides weights and the KV cache: for the worker, and for doctor, which loads no model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_gaudi_spec.config import Speculation

NO_ROOM_FOR_KV = (
    "drafting leaves no memory for the KV cache; lower --max-num-seqs, num_speculative_tokens in "
    "--speculative-config or universal_slab in additional_config.gaudi_spec."
)
_FLOAT32_BYTES = 4


def laws_shape(speculation: Speculation, max_rows: int, vocab_size: int) -> tuple[int, int, int]:
    """Of the laws of drafts, in float32; zero rows where no law is kept."""
    return (max_rows + 1 if speculation.keeps_laws else 0), speculation.num_drafts, vocab_size


def slab_blocks(max_rows: int, length: int, block_size: int) -> int:
    """Of a drafter's own KV: each row's, and the pad block."""
    return 1 + max_rows * -(-length // block_size)


class KVBlock(NamedTuple):
    """Of a drafter, in all its layers."""

    num_tokens: int
    num_bytes: int


def drafting_bytes(
    speculation: Speculation, max_rows: int, vocab_size: int, slab_block: KVBlock | None
) -> dict[str, int]:
    """How much, by what for. `slab_block`: None for a drafter without a slab."""
    length = speculation.universal_slab
    parts = {
        "the float32 laws of drafts: sequences x drafts x vocabulary": (
            _FLOAT32_BYTES * math.prod(laws_shape(speculation, max_rows, vocab_size))
        ),
        f"the drafter's KV: sequences x {length} tokens (universal_slab)": (
            0 if slab_block is None else slab_blocks(max_rows, length, slab_block.num_tokens) * slab_block.num_bytes
        ),
    }
    return {name: size for name, size in parts.items() if size}
