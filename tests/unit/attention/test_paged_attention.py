"""Both forms of paged attention against dense attention in float64, row by row."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.operations import Dispatched
from tests.support.reference.attention import attend_row
from vllm_gaudi_spec.attention import flat, padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, FlatBlocks

# Absolute and relative, for values of size 1. In float32, sums of up to 4096 terms have another order. In bfloat16,
# scores, weights, each block's part, their sum and the result are rounded to 8 bits. The reference has the same inputs.
TOLERANCE = {torch.float32: (2e-5, 0.0), torch.bfloat16: (1.5e-2, 1.5e-2)}

Form = Callable[..., torch.Tensor]


def in_slices(*args: Any) -> torch.Tensor:
    """Slices so short that most rows have entries in several, and some slices have none of a row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "SLICE", 3)
        return flat.attend(*args)


def group_blocks(call: AttentionCall) -> AttentionCall:
    """List the same blocks in entries of two, of which a row's last one, and with a window its first, are padded."""
    listed = call.flat
    entries: dict[tuple[int, int], list[int]] = {}
    for block, row, place in zip(listed.ids.tolist(), listed.rows_N.tolist(), listed.index_N.tolist(), strict=True):
        entries.setdefault((row, place // 2 * 2), [0, 0])[place % 2] = block
    rows, places = torch.tensor(list(entries), dtype=torch.int32).unbind(1)
    grouped = FlatBlocks(torch.tensor(list(entries.values()), dtype=torch.int32).flatten(), rows, places)
    plans = call._plans.setdefault("in groups", {})  # not those of the other forms
    return dataclasses.replace(call, flat=grouped, _plans=plans)


def in_groups(
    query_THD: torch.Tensor,
    keys_NSKD: torch.Tensor,
    values_NSKD: torch.Tensor | None,
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> torch.Tensor:
    return in_slices(query_THD, keys_NSKD, values_NSKD, group_blocks(call), spec)


FORMS: dict[str, Form] = {
    "padded": padded.attend,
    "flat": flat.attend,
    "flat, in slices": in_slices,
    "flat, in groups": in_groups,
}


@dataclasses.dataclass
class Scene:
    """A batch: real rows first, then rows of padding."""

    spec: AttentionLayerSpec
    call: AttentionCall
    query_BQHD: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor | None
    """None if values are a part of the keys."""
    starts: list[int]
    real: list[int]
    """The number of real queries of each row."""
    blocks: list[dict[int, int]]
    """Maps the index of a block to the block, for each real row."""

    def attend(self, form: Form, call: AttentionCall | None = None) -> torch.Tensor:
        """Return [B, Q, H, D]."""
        query = self.query_BQHD.flatten(0, 1)
        out = form(query, self.keys, self.values, call or self.call, self.spec)
        assert out.dtype == query.dtype
        assert out.shape == (*query.shape[:-1], self.spec.output_size)
        return out.unflatten(0, self.query_BQHD.shape[:2])

    def dense(self) -> list[torch.Tensor]:
        values = self.keys[..., : self.spec.output_size] if self.values is None else self.values
        return [
            attend_row(self.query_BQHD[row, :real], self.keys, values, blocks, start, self.spec)
            for row, (start, real, blocks) in enumerate(zip(self.starts, self.real, self.blocks, strict=True))
        ]


def make_scene(
    starts: list[int],
    queries: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 32,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    real: list[int] | None = None,
    pad_rows: int = 1,
    pad_entries: int = 5,
    pad_size: float = 1e4,
    query_size: float = 1.0,
    value_size: int | None = None,
    sinks: float | None = None,
    slopes: bool = False,
) -> Scene:
    """Make a batch whose rows own random blocks, but none wholly behind the window.

    Entries of the list are shuffled, including padding. Unowned blocks hold NaN; the pad block and what follows a row's
    keys hold large values. `sinks` is how far the heads' sinks are apart.
    """
    generator = torch.Generator().manual_seed(0)
    real = real or [queries] * len(starts)
    rows = len(starts) + pad_rows
    ends = [start + count for start, count in zip(starts, real, strict=True)]
    width = max(-(-end // block_size) for end in ends) + 1
    places = [
        [
            place
            for place in range(-(-end // block_size))
            if window is None or (place + 1) * block_size > start - window + 1
        ]
        for start, end in zip(starts, ends, strict=True)
    ]
    num_owned = sum(map(len, places))
    ids = iter((torch.randperm(num_owned + 3, generator=generator) + 1).tolist())
    blocks = [{place: next(ids) for place in row} for row in places]
    keys, values = (
        torch.full((num_owned + 4, block_size, kv_heads, head_size), torch.nan, dtype=dtype) for _ in range(2)
    )
    for stored in (keys, values):
        for end, row in zip(ends, blocks, strict=True):
            for place, block in row.items():
                stored[block] = torch.randn(stored[block].shape, generator=generator)
                stored[block, max(0, end - place * block_size) :] *= 100
        largest = torch.finfo(dtype).max
        stored[0] = (torch.randn(stored[0].shape, generator=generator) * pad_size).clamp(-largest, largest)
    table = torch.zeros(rows, width, dtype=torch.int32)
    entries = [(0, rows, place % width) for place in range(pad_entries)]
    for number, row in enumerate(blocks):
        for place, block in row.items():
            table[number, place] = block
            entries.append((block, number, place))
    order = torch.randperm(len(entries), generator=generator).tolist()
    listed = torch.tensor([entries[i] for i in order] + [(0, rows, 0)] * pad_entries, dtype=torch.int32)
    query = torch.randn(rows, queries, heads, head_size, generator=generator) * query_size
    return Scene(
        spec=AttentionLayerSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            sliding_window=window,
            logits_soft_cap=soft_cap,
            dtype=dtype,
            block_size=block_size,
            value_size=value_size,
            attention_chunk=chunk,
            sinks_H=None if sinks is None else torch.linspace(sinks, -sinks, heads).to(dtype),
            slopes_H=2.0 ** -torch.arange(1, heads + 1) if slopes else None,
        ),
        call=AttentionCall(
            num_rows=rows,
            num_queries=queries,
            starts_B=torch.tensor(starts + [0] * pad_rows, dtype=torch.int32),
            block_table_BW=table,
            flat=FlatBlocks(*(column.contiguous() for column in listed.unbind(1))),
        ),
        query_BQHD=query.to(dtype),
        keys=keys,
        values=values if value_size is None else None,
        starts=starts,
        real=real,
        blocks=blocks,
    )


def check(scene: Scene, forms: dict[str, Form] = FORMS) -> None:
    dense = scene.dense()
    atol, rtol = TOLERANCE[scene.spec.dtype]
    for name, form in forms.items():
        out = scene.attend(form)
        assert torch.isfinite(out).all(), name
        for row, expected in enumerate(dense):
            torch.testing.assert_close(
                out[row, : scene.real[row]].double(),
                expected,
                atol=atol,
                rtol=rtol,
                msg=lambda text, name=name, row=row: f"{name}, row {row}: {text}",
            )
        if name != "padded":
            assert not out[len(dense) :].any(), "a row that owns no entry is zero"


HEADS = [dict(heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((4, 4), (6, 2), (5, 1))]
BLOCK_ENDS = [0, 5, 31, 39, 64, 95, 200]
BFLOAT16 = dict(dtype=torch.bfloat16, heads=8, head_size=128)
SCENES: dict[str, list[dict[str, Any]]] = {
    "heads": [dict(starts=[0, 31, 70], head_size=size, **heads) for heads in HEADS for size in (64, 96, 256)],
    "windows": [
        dict(starts=BLOCK_ENDS, window=window, soft_cap=soft_cap)
        for window in (1, 7, 31, 32, 33, 70, 1000)
        for soft_cap in (0.0, 2.0)
    ],
    "chunks": [dict(starts=BLOCK_ENDS, chunk=chunk) for chunk in (1, 7, 32, 40, 1000)],
    "soft caps": [dict(starts=[0, 40], soft_cap=soft_cap, query_size=8.0) for soft_cap in (0.5, 30.0)],
    # exp cannot represent by how much the largest scores of blocks differ.
    "scores far apart": [dict(starts=[90, 300], query_size=100.0)],
    "bfloat16": [dict(starts=[0, 128, 700], window=window, soft_cap=20.0, **BFLOAT16) for window in (None, 40)],
    "latent": [
        dict(starts=[0, 31, 200], heads=8, kv_heads=1, head_size=size, value_size=value_size, dtype=dtype)
        for size, value_size in ((576, 512), (56, 40), (64, 64))
        for dtype in (torch.float32, torch.bfloat16)
    ],
    "ragged contexts": [
        dict(starts=[1, 4093, 517], block_size=size, window=window) for size in (16, 128) for window in (None, 300)
    ],
    "one row of one block": [dict(starts=[3], pad_rows=0, pad_entries=0)],
    "padding": [dict(starts=[10, 70], pad_rows=rows, pad_entries=entries) for rows in (0, 5) for entries in (0, 40)],
}


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("scenes", SCENES.values(), ids=SCENES)
def test_attention_equals_dense(scenes: list[dict[str, Any]], queries: int) -> None:
    for scene in scenes:
        check(make_scene(queries=queries, **scene))


@pytest.mark.parametrize("queries", [17, 64])
@pytest.mark.parametrize("layer", [dict(), dict(window=20), dict(chunk=32)], ids=str)
def test_prompts_behind_a_cached_prefix(layer: dict[str, Any], queries: int) -> None:
    check(make_scene([32, 96, 5, 0], queries, **layer))


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("sinks", [0.0, 3.0, 300.0])
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(6, 2, torch.float32), (4, 4, torch.bfloat16)])
def test_a03_sinks(sinks: float, queries: int, window: int | None, heads: int, kv_heads: int, dtype: Any) -> None:
    """A head's sink takes its share of the weights once per row: far above all scores nothing is left, far below
    everything."""
    sizes = dict(heads=heads, kv_heads=kv_heads, dtype=dtype)
    check(make_scene([0, 5, 31, 64, 200], queries, **sizes, window=window, sinks=sinks))


@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a23_slopes(queries: int, heads: dict[str, int]) -> None:
    """Scores fall with the distance between query and key, at a different rate in each head."""
    check(make_scene([0, 1, 30, 100, 700], queries, **heads, slopes=True))


def test_sinks_slopes_windows_and_soft_caps_together() -> None:
    check(make_scene([0, 31, 200], 3, window=40, soft_cap=5.0, sinks=2.0, slopes=True, real=[3, 1, 2]))


@pytest.mark.parametrize("window", [None, 3])
def test_padding_queries_beyond_the_last_block(window: int | None) -> None:
    """They may be beyond the row's last block, and beyond the table."""
    check(make_scene([30, 62, 63, 0], 9, real=[1, 2, 1, 9], window=window))


@pytest.mark.parametrize("form", ["padded", "flat"])
def test_r11_contents_of_the_pad_block_have_no_effect(form: str) -> None:
    """It holds finite numbers, some too large for a score."""
    outs = [make_scene([10, 70], 3, pad_rows=0, pad_size=size).attend(FORMS[form]) for size in (0.0, 1.0, 3e38)]
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("sinks", "slopes"), [(None, False), (3.0, False), (None, True)])
@pytest.mark.parametrize("form", FORMS)
def test_o32_queries_that_see_no_key(form: str, sinks: float | None, slopes: bool) -> None:
    """All keys of these rows are behind the window."""
    scene = make_scene([10, 20], 2, window=4, sinks=sinks, slopes=slopes)
    call = dataclasses.replace(scene.call, starts_B=torch.tensor([1000, 2000, 3000], dtype=torch.int32), _plans={})
    assert torch.equal(scene.attend(FORMS[form], call), torch.zeros_like(scene.query_BQHD))


def test_all_rows_are_padding() -> None:
    """A warm-up step has only padding."""
    scene = make_scene([10], 2)
    listed = scene.call.flat
    nobody = FlatBlocks(torch.zeros_like(listed.ids), torch.full_like(listed.rows_N, 2), listed.index_N)
    call = dataclasses.replace(scene.call, flat=nobody, _plans={})
    assert torch.equal(scene.attend(flat.attend, call), torch.zeros_like(scene.query_BQHD))


def check_bidirectional(form: Form, starts: list[int], real: list[int], queries: int, **layer: Any) -> None:
    """Check queries that see the keys up to their row's last real query; a window extends equally far both ways."""
    scene = make_scene(starts, queries, real=real, **layer)
    call = dataclasses.replace(scene.call, num_real_B=torch.tensor([*real, 0], dtype=torch.int32), _plans={})
    scene = dataclasses.replace(scene, spec=dataclasses.replace(scene.spec, is_causal=False))
    attended_BQHD = scene.attend(form, call)
    assert torch.isfinite(attended_BQHD).all()
    window = scene.spec.sliding_window
    for row, (start, count, blocks) in enumerate(zip(starts, real, scene.blocks, strict=True)):
        end = start + count
        spans = [(place, min(place + (window or end), end) - 1) for place in reversed(range(start, end))]
        expected = attend_row(scene.query_BQHD[row, :count], scene.keys, scene.values, blocks, start, scene.spec, spans)
        torch.testing.assert_close(attended_BQHD[row, :count].double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("form", FORMS)
def test_bidirectional_queries_see_the_keys_of_their_whole_row(form: str, window: int | None) -> None:
    check_bidirectional(FORMS[form], [10, 70, 100], [5, 5, 3], 5, window=window)


@pytest.mark.parametrize("form", ["padded", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_does_not_wait_for_the_device(form: str, dtype: torch.dtype) -> None:
    """Operations whose shape or path depends on values split a Gaudi's graph, and advanced indexing breaks it."""
    scene = make_scene([0, 70], 3, window=40, soft_cap=5.0, dtype=dtype)
    with Dispatched() as dispatched:
        scene.attend(FORMS[form])
    forbidden = {"_local_scalar_dense", "nonzero", "masked_select", "index", "index_put", "index_put_", "_unique2"}
    assert forbidden.isdisjoint(dispatched.names)


@pytest.mark.parametrize(
    ("rows", "blocks", "size"), [(1, 1, 1), (32, 1023, 1), (32, 1024, 2), (32, 4096, 4), (1, 224, 8), (1, 1024, 8)]
)
def test_entries_of_several_blocks_add_little_padding(rows: int, blocks: int, size: int) -> None:
    assert flat.choose_group(blocks, rows) == size
    assert rows * (size - 1) <= blocks / 32
