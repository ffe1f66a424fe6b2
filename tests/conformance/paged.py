"""An attention layer over paged KV, driven as the runner drives it, beside dense attention in float64.

B rows of Q queries; H query heads, K key/value heads, D head size; S tokens in a block.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.reference.attention import attend_one
from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec, Blocks, build_rectangle
from vllm_gaudi_spec.attention.operations import PLAIN, Operations
from vllm_gaudi_spec.devices.base import DeviceBackend
from vllm_gaudi_spec.step_inputs import make_host_counts, make_host_lengths

# Absolute and relative. The reference gets the same inputs, rounded as they are; float32 sums in another order, the
# others round scores, weights and results.
TOLERANCE = {torch.float32: (2e-5, 0.0), torch.float16: (4e-3, 4e-3), torch.bfloat16: (1.5e-2, 1.5e-2)}


@dataclass(frozen=True, kw_only=True)
class Kind:
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    window: int | None = None
    chunk: int | None = None
    """Queries see their own chunk of so many positions only."""
    soft_cap: float = 0.0
    value_size: int | None = None
    """Of a latent layer, which keeps no values."""
    sinks: bool = False
    slopes: bool = False
    """ALiBi."""
    dtype: torch.dtype = torch.float32

    @property
    def output_size(self) -> int:
        return self.head_size if self.value_size is None else self.value_size

    def kv_spec(self, block_size: int) -> Any:
        """vLLM's account of the KV that such a layer keeps."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

        cls = FullAttentionSpec if self.value_size is None else MLAAttentionSpec
        return cls(block_size=block_size, num_kv_heads=self.kv_heads, head_size=self.head_size, dtype=self.dtype)


def allocate(backend: DeviceBackend, kinds: dict[str, Kind], num_blocks: int) -> dict[str, Any]:
    """What `allocate_kv` makes of a plan in which each layer has an offset of its own."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheLayout, KVCacheTensor

    specs = {name: kind.kv_spec(backend.traits.block_size) for name, kind in kinds.items()}
    sizes = {name: spec.page_size_bytes * num_blocks for name, spec in specs.items()}
    tensors, offset = [], 0
    for name, spec in specs.items():
        tensors.append(KVCacheTensor(sum(sizes.values()), [name], sizes[name], spec.page_size_bytes, offset))
        offset += sizes[name]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    return backend.memory.allocate_kv(KVCacheConfig(num_blocks, tensors, groups), KVCacheLayout.LBHNC)


class Layer:
    """Writes and attends in one graph, as a layer of a model does."""

    def __init__(self, backend: DeviceBackend, kind: Kind, kv_cache: Any, operations: Operations | None = None) -> None:
        self.backend, self.kind, self.kv_cache = backend, kind, kv_cache
        self.on_host = AttentionLayerSpec(
            num_heads=kind.heads,
            num_kv_heads=kind.kv_heads,
            head_size=kind.head_size,
            scale=kind.head_size**-0.5,
            sliding_window=kind.window,
            logits_soft_cap=kind.soft_cap,
            dtype=kind.dtype,
            block_size=backend.attention.kv_shape(kv_cache).block_size,
            value_size=kind.value_size,
            attention_chunk=kind.chunk,
            layer_operations=operations is not None,
            operations=operations or PLAIN,
            sinks_H=torch.linspace(4.0, -4.0, kind.heads).to(kind.dtype) if kind.sinks else None,
            slopes_H=2.0 ** -torch.arange(1, kind.heads + 1) if kind.slopes else None,
        )
        by_head = {name: getattr(self.on_host, name) for name in ("sinks_H", "slopes_H")}
        upload = backend.memory.upload
        self.spec = replace(self.on_host, **{name: upload(each) for name, each in by_head.items() if each is not None})
        self.ops: Any = backend.attention if backend.attention.supports_attention(self.spec) else torch_ops
        self.step = backend.graphs.graph(self._step)
        self.first_step = backend.graphs.graph(self._first_step)

    def _step(
        self,
        starts_B: torch.Tensor,
        num_real_B: torch.Tensor,
        blocks: Blocks,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        *,
        from_start: bool = False,
    ) -> torch.Tensor:
        rows = starts_B.shape[0]
        tokens_BQ = torch.zeros((rows, len(query_THD) // rows), dtype=torch.int32, device=starts_B.device)
        inputs = build_rectangle(tokens_BQ, starts_B, num_real_B, blocks, self.backend.row_operations)
        finite = self.backend.attention.finite
        key_TKD, value_TKD = finite(key_TKD), None if value_TKD is None else finite(value_TKD)
        self.ops.write_kv(key_TKD, value_TKD, self.kv_cache, inputs.slots[0], self.spec)
        call = inputs.calls[0]
        if from_start and value_TKD is not None:
            call = replace(call, from_start=True, fresh_kv=(key_TKD, value_TKD))
        return self.ops.attend(query_THD, self.kv_cache, call, self.spec)

    def _first_step(self, *inputs: Any) -> torch.Tensor:
        """A step over prompts' first chunks."""
        return self._step(*inputs, from_start=True)


class Texts:
    """Rows of tokens with KV on a layer. What a row has not written yet may change."""

    poison: float | None = None
    """What the first row's tokens are, and all padding, in place of numbers. What comes out of them is not compared."""
    compared_each = 1
    """Of a row's queries each n-th is compared."""
    in_place = False
    """Whether decodes read blocks in place, on devices with a flat block list."""
    was_poisoned = False
    """Then what comes out of padding, which may read old keys, may be no number."""

    def __init__(self, layer: Layer, rows: int, length: int, num_blocks: int, seed: int = 0) -> None:
        self.layer, self.length = layer, length
        self._generator = torch.Generator().manual_seed(seed)
        self.width = -(-length // layer.spec.block_size)
        assert rows * self.width < num_blocks
        ids = torch.randperm(num_blocks - 1, generator=self._generator)[: rows * self.width] + 1
        self.table_BW = ids.view(rows, self.width).int()
        kind = layer.kind
        self.keys = self._random(rows, length, kind.kv_heads, kind.head_size)
        self.values = self._random(rows, length, kind.kv_heads, kind.head_size)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.layer.kind.dtype)

    def rejected(self, row: int, start: int) -> None:
        """What stands from `start` on will be other tokens."""
        for stored in (self.keys, self.values):
            stored[row, start:] = self._random(*stored[row, start:].shape)

    def step(
        self,
        starts: list[int],
        real: list[int],
        queries: int,
        *,
        decode: bool,
        members: list[int] | None = None,
        pad_rows: int = 0,
    ) -> torch.Tensor:
        """Runs a rectangle of these rows, and rows of padding, and compares it with dense attention."""
        members = list(range(len(starts))) if members is None else members
        rows, kind = len(starts) + pad_rows, self.layer.kind
        query = self._random(rows, queries, kind.heads, kind.head_size)
        # What padding holds is finite, and its keys larger than others.
        key, value = (self._random(rows, queries, kind.kv_heads, kind.head_size) * 10 for _ in range(2))
        for index, (row, start, count) in enumerate(zip(members, starts, real, strict=True)):
            for given, stored in ((key, self.keys), (value, self.values)):
                given[index, :count] = stored[row, start : start + count]
        if self.poison is not None:
            self.was_poisoned = True
            for given in (query, key, value):
                given[[row == 0 for row in members] + [True] * pad_rows] = self.poison
        upload = self.layer.backend.memory.upload
        padding = [0] * pad_rows
        is_first = self.layer.backend.traits.causal_first_chunks and not decode and not any(starts)
        step = self.layer.first_step if is_first else self.layer.step
        out = step(
            upload(torch.tensor(starts + padding, dtype=torch.int32)),
            upload(torch.tensor(real + padding, dtype=torch.int32)),
            self._blocks(starts, real, queries, members, pad_rows, decode),
            upload(query.flatten(0, 1)),
            upload(key.flatten(0, 1)),
            upload(value.flatten(0, 1)) if kind.value_size is None else None,
        )
        out_BQHD = self.layer.backend.memory.download(out).clone().unflatten(0, (rows, queries))
        assert torch.isfinite(out_BQHD).all() or self.was_poisoned
        self._compare(out_BQHD, query, starts, real, members)
        return out_BQHD

    def _blocks(
        self, starts: list[int], real: list[int], queries: int, members: list[int], pad_rows: int, decode: bool
    ) -> Blocks:
        backend, size, window = self.layer.backend, self.layer.spec.block_size, self.layer.kind.window
        rows = len(starts) + pad_rows
        # Padding of a row may stand after its last block.
        table = torch.zeros(rows, -(-(self.length + queries) // size), dtype=torch.int32)
        entries = []
        for index, (row, start, count) in enumerate(zip(members, starts, real, strict=True)):
            for block in range(-(-(start + count) // size)):
                if window is None or (block + 1) * size > start - window + 1:  # else vLLM has taken it back
                    table[index, block] = self.table_BW[row, block]
                    entries.append((int(self.table_BW[row, block]), index, block))
        listed: tuple[torch.Tensor, ...] = ()
        if decode and backend.traits.flat_decode:
            if self.in_place:
                owners = {block: (row, index) for block, row, index in entries}
                end = int(self.table_BW.max()) + 1
                entries = [owners.get(block, (rows, 0)) for block in range(end)]
            else:
                entries += [(0, rows, 0)] * (table.numel() - len(entries))
            listed = (backend.memory.upload(torch.tensor(entries, dtype=torch.int32).T.contiguous()),)
        # The host knows of a decode what it may come to have at most.
        ends = [start + (queries if decode else count) for start, count in zip(starts, real, strict=True)]
        lengths_B = counts_B = None
        if backend.traits.needs_host_lengths:
            lengths_B = make_host_lengths(rows, ends, table.shape[1] * size)
            counts_B = None if decode else make_host_counts(rows, real)
        return Blocks((backend.memory.upload(table),), (size,), listed, lengths_B, counts_B)

    def _compare(
        self, out_BQHD: torch.Tensor, query: torch.Tensor, starts: list[int], real: list[int], members: list[int]
    ) -> None:
        kind = self.layer.kind
        atol, rtol = TOLERANCE[kind.dtype]
        for index, (row, start, count) in enumerate(zip(members, starts, real, strict=True)):
            if row == 0 and self.poison is not None:
                continue
            keys = self.keys[row]
            values = self.values[row] if kind.value_size is None else keys[..., : kind.value_size]
            for q in range(0, count, self.compared_each):
                expected = attend_one(query[index, q], keys, values, start + q, self.layer.on_host)
                torch.testing.assert_close(
                    out_BQHD[index, q].double(),
                    expected,
                    atol=atol,
                    rtol=rtol,
                    msg=lambda text, row=row, at=start + q: f"row {row}, position {at}: {text}",
                )
