"""Keys that a layer selects by an indexer, in a graph of the device, as the host selects them."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.unit.attention.test_selection import make
from vllm_gaudi_spec.attention import flat, padded
from vllm_gaudi_spec.attention.metadata import FlatBlocks, IndexQueries
from vllm_gaudi_spec.devices.base import DeviceBackend


@pytest.mark.parametrize("form", [padded, flat], ids=["padded", "flat"])
@pytest.mark.parametrize("queries", [1, 4])
def test_a24_selected_keys(backend: DeviceBackend, form: ModuleType, queries: int) -> None:
    if form is flat and not backend.traits.flat_decode:
        pytest.skip("the device never attends over lists of blocks")
    scene, call = make([0, 7, 31, 64, 200], queries, 8)
    assert call.index is not None
    assert call.flat is not None
    query = scene.query_BQHD.flatten(0, 1)
    expected = form.attend(query, scene.keys, None, call, scene.spec)
    shared = replace(scene.spec, index_size=0)

    def attend(
        query: torch.Tensor, keys: torch.Tensor, starts: torch.Tensor, table: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, listed = IndexQueries(*rest[:2]), FlatBlocks(*rest[2:])
        here = replace(call, starts_B=starts, block_table_BW=table, flat=listed, index=index, _plans={})
        first = form.attend(query, keys, None, here, scene.spec)
        return first, form.attend(query, keys, None, here.replace_index(None), shared)

    blocks = (call.flat.ids, call.flat.rows_N, call.flat.index_N)
    arguments = (query, scene.keys, call.starts_B, call.block_table_BW, *call.index, *blocks)
    run = backend.graphs.graph(attend)
    for found in run(*(backend.memory.upload(one) for one in arguments)):
        torch.testing.assert_close(found.cpu(), expected, atol=2e-5, rtol=0.0)
