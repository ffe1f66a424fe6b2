"""KV memory: what is allocated, and copies of blocks."""

from typing import Any

import pytest
import torch

from tests.conformance.graphs import compiled
from tests.conformance.paged import Kind, Layer, allocate
from vllm_gaudi_spec.attention.metadata import AttentionCall, Blocks
from vllm_gaudi_spec.devices.base import DeviceBackend
from vllm_gaudi_spec.step_inputs import make_host_lengths

# With a window of one token, attention gives back the values that it stored.
PLAIN_KIND = Kind(heads=1, kv_heads=1, window=1)
LATENT_KIND = Kind(heads=1, kv_heads=1, head_size=48, value_size=48, window=1)
BLOCKS = 24


class Peek:
    """Reads and writes single tokens of a layer's KV."""

    def __init__(self, backend: DeviceBackend, kind: Kind, kv_cache: Any) -> None:
        self.layer = layer = Layer(backend, kind, kv_cache)
        self._write = backend.graphs.graph(
            lambda key, value, slots: layer.ops.write_kv(key, value, kv_cache, slots, layer.spec)
        )
        self._read = backend.graphs.graph(self._attend)

    def _attend(self, query_THD: torch.Tensor, starts_B: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        rows = len(query_THD)
        (table,) = blocks.tables
        call = AttentionCall(
            num_rows=rows, num_queries=1, starts_B=starts_B, block_table_BW=table, host_lengths_B=blocks.lengths_B
        )
        return self.layer.ops.attend(query_THD, self.layer.kv_cache, call, self.layer.spec)

    def write(self, numbers: torch.Tensor, blocks: list[int], offset: int) -> None:
        """A number a block, at each slot of its tokens at `offset`."""
        kind, upload = self.layer.kind, self.layer.backend.memory.upload
        tokens = numbers[:, None, None].expand(-1, 1, kind.head_size).contiguous()
        slots = torch.tensor(blocks) * self.layer.spec.block_size + offset
        self._write(upload(tokens), upload(tokens) if kind.value_size is None else None, upload(slots))

    def read(self, blocks: list[int], offset: int) -> list[float]:
        backend, kind, rows = self.layer.backend, self.layer.kind, len(blocks)
        size, table = self.layer.spec.block_size, torch.tensor(blocks, dtype=torch.int32)[:, None]
        needs_lengths = backend.traits.needs_host_lengths
        lengths_B = make_host_lengths(rows, [offset + 1] * rows, size) if needs_lengths else None
        out = self._read(
            backend.memory.upload(torch.ones(rows, 1, kind.head_size)),
            backend.memory.upload(torch.full((rows,), offset, dtype=torch.int32)),
            Blocks((backend.memory.upload(table),), (size,), lengths_B=lengths_B),
        )
        found = backend.memory.download(out)[:, 0]
        assert (found == found[:, :1]).all()
        return found[:, 0].tolist()


def peeks(backend: DeviceBackend, kinds: dict[str, Kind]) -> tuple[dict[str, Any], dict[str, Peek]]:
    caches = allocate(backend, kinds, BLOCKS)
    assert set(caches) == set(kinds)
    return caches, {name: Peek(backend, kind, caches[name]) for name, kind in kinds.items()}


EACH = [{"a": PLAIN_KIND, "b": PLAIN_KIND}, {"a": LATENT_KIND, "b": LATENT_KIND}]
either_kind = pytest.mark.parametrize("kinds", EACH, ids=["keys and values", "latent"])


@either_kind
def test_r11_it_is_zero_and_layers_have_their_own(backend: DeviceBackend, kinds: dict[str, Kind]) -> None:
    caches, layers = peeks(backend, kinds)
    every, last = list(range(BLOCKS)), backend.traits.block_size - 1
    assert {backend.attention.kv_shape(cache).block_size for cache in caches.values()} == {backend.traits.block_size}
    for layer in layers.values():
        assert layer.read(every, 0) == layer.read(every, last) == [0.0] * BLOCKS
    layers["a"].write(torch.arange(1.0, BLOCKS), every[1:], last)
    assert layers["a"].read(every, last) == [float(block) for block in every]
    assert layers["a"].read(every, last - 1) == layers["b"].read(every, last) == [0.0] * BLOCKS


@either_kind
def test_o14_blocks_are_copied_in_all_layers(backend: DeviceBackend, kinds: dict[str, Kind]) -> None:
    """Few and many at a time, by what was made once."""
    caches, layers = peeks(backend, kinds)
    every, last = list(range(BLOCKS)), backend.traits.block_size - 1
    for number, layer in enumerate(layers.values()):
        for offset in (0, last):
            layer.write(torch.arange(1.0, 12.0) + 100 * number + 20 * offset, every[1:12], offset)
    copy = backend.memory.make_block_copier(caches)
    copy([(0, 0)])
    made = compiled(backend)
    copy([(1, 13), *((2, target) for target in range(14, 23))])
    copy([(3, 23), (4, 1)])
    assert compiled(backend) == made
    expected = [0, 4, *range(2, 12), 0, 1, *[2] * 9, 3]
    for number, layer in enumerate(layers.values()):
        for offset in (0, last):
            found = layer.read(every, offset)
            assert found == [float(block and block + 100 * number + 20 * offset) for block in expected]
