"""Bidirectional attention within images: the CPU kernel and plain torch against dense attention."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.attention_layers import call
from tests.support.attention_layers import layer as attention_layer
from tests.support.reference.attention import attend_row
from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.attention.metadata import AttentionCall, Packed, SpanRows, Spans
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.devices.cpu.backend import make_backend

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 32
QUERIES = 16
STARTS, REAL = [0, 40], [16, 11]
SPANS = [[(2, 6), (7, 14)], [(35, 45)]]
"""Spans by row: two adjacent images, and one that began before the chunk."""
ATTENTION = make_backend().attention
FORMS = [torch_ops] + [ATTENTION] * hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "torch" if form is torch_ops else "kernel")
def test_image_tokens_attend_in_both_directions(form: object, window: int | None, is_packed: bool) -> None:
    torch.manual_seed(0)
    layer = attention_layer(num_heads=HEADS, dtype=torch.float32, block_size=BLOCK, sliding_window=window)
    keys, values = torch.randn(2, 5 * BLOCK, KV_HEADS, SIZE)
    cache = torch.zeros(5, KV_HEADS, BLOCK, 2 * SIZE)
    form.write_kv(keys, values, cache, torch.arange(5 * BLOCK), layer)
    numbered = [(row, *span) for row, spans in enumerate(SPANS) for span in spans]
    rows, firsts, ends = torch.tensor(numbered).T
    lasts = torch.zeros(2, QUERIES, dtype=torch.int32)
    for row, first, last in numbered:
        lasts[row, max(first - STARTS[row], 0) : last + 1 - STARTS[row]] = last
    spans = Spans(lasts, SpanRows(rows, firsts.int(), ends.int()))
    asked = call(STARTS, [[2, 0], [4, 3]], QUERIES, spans=spans)
    query = torch.randn(2, QUERIES, HEADS, SIZE)
    given = query.flatten(0, 1)
    if is_packed:
        packed = Packed.from_counts(torch.tensor(REAL, dtype=torch.int32), QUERIES)
        asked, given = replace(asked, packed=packed), given.index_select(0, packed.index_T)
    found = form.attend(given, cache, asked, layer)
    found_by_row = found.split(REAL) if is_packed else found.unflatten(0, (2, QUERIES))
    for row, blocks in enumerate([{0: 2}, {0: 4, 1: 3}]):
        blocks_NSKD = (stored.view(5, BLOCK, KV_HEADS, SIZE) for stored in (keys, values))
        expected = attend_row(query[row, : REAL[row]], *blocks_NSKD, blocks, STARTS[row], layer, SPANS[row])
        torch.testing.assert_close(found_by_row[row][: REAL[row]].double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("in_windows_only", [False, True])
def test_layers_without_a_window_can_stay_causal_over_images(window: int | None, in_windows_only: bool) -> None:
    """Gemma 4 has such layers."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2 * BLOCK, KV_HEADS, SIZE)
    cache = torch.zeros(2, KV_HEADS, BLOCK, 2 * SIZE)
    layer = RectangleAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, window, "auto")
    layer.bind(SimpleNamespace(layer_name="a layer"), cache, load_backend())
    layer._ops.write_kv(keys, values, cache, torch.arange(2 * BLOCK), layer.spec)
    rows = SpanRows(torch.tensor([0]), *torch.tensor([[2], [6]], dtype=torch.int32))
    lasts = torch.tensor([[0, 0, 6, 6, 6, 6, 6, 0]], dtype=torch.int32)
    asked = call([0], [[1]], 8, spans=Spans(lasts, rows, in_windows_only))
    query = torch.randn(8, HEADS, SIZE)
    found = layer.forward(None, query, None, None, cache, asked)
    blocks_NSKD = (stored.view(2, BLOCK, KV_HEADS, SIZE) for stored in (keys, values))
    spans = [] if in_windows_only and window is None else [(2, 6)]
    assert (layer.spec.scale, layer.spec.sliding_window) == (SIZE**-0.5, window)
    expected = attend_row(query, *blocks_NSKD, {0: 1}, 0, layer.spec, spans)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    assert asked.spans is not None, "the next layer has a window"


@pytest.mark.parametrize(("shares_kv", "from_start"), [(False, True), (True, True), (False, False)])
def test_first_chunk_is_given_its_keys_finite(
    shares_kv: bool, from_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds them finite, too. A layer that reads another layer's cache is not given its own."""
    layer = RectangleAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
    layer.kv_sharing_target_layer_name = "another layer" if shares_kv else None
    cache = torch.zeros(2, KV_HEADS, BLOCK, 2 * SIZE)
    layer.bind(SimpleNamespace(layer_name="a layer"), cache, load_backend())
    given: list[AttentionCall] = []
    monkeypatch.setattr(layer._ops, "attend", lambda query, kv_cache, call, spec: given.append(call), raising=False)
    key, value = (torch.full((2, KV_HEADS, SIZE), number) for number in (torch.nan, torch.inf))
    asked = call([0], [[1]], 2, from_start=from_start)
    layer.forward(None, torch.zeros(2, HEADS, SIZE), key, value, cache, asked)
    (passed,) = given
    assert len(passed.fresh_kv) == (2 if from_start and not shares_kv else 0)
    assert all(part.isfinite().all() for part in passed.fresh_kv)
