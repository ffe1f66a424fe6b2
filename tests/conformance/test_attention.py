"""KV that is written and attended to, against dense attention in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.fused import Called, of_attention
from tests.conformance.graphs import compiled
from tests.conformance.paged import Kind, Layer, Texts, allocate
from vllm_gaudi_spec.attention.metadata import Packed, build_rectangle
from vllm_gaudi_spec.attention.operations import OWN, PLAIN
from vllm_gaudi_spec.devices.base import DeviceBackend

LATENT = Kind(heads=5, kv_heads=1, head_size=56, value_size=40)
KINDS = {
    "a head each": Kind(kv_heads=4),
    "heads in groups": Kind(heads=6, head_size=128),
    "one KV head": Kind(kv_heads=1),
    "a small window": Kind(window=7),
    "a window": Kind(window=200),
    "chunks": Kind(chunk=24),
    "soft cap": Kind(soft_cap=5.0),
    "window and soft cap": Kind(window=33, soft_cap=5.0),
    "latent": LATENT,
    "sinks and a window": Kind(heads=6, window=33, sinks=True),
    "slopes": Kind(heads=6, slopes=True),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))


def texts(backend: DeviceBackend, kind: Kind, rows: int, length: int, **more: Any) -> Texts:
    num_blocks = rows * -(-length // backend.traits.block_size) + 2
    layer = Layer(backend, kind, allocate(backend, {"a": kind}, num_blocks)["a"], **more)
    return Texts(layer, rows, length, num_blocks)


def read_prompts(found: Texts, lengths: list[int]) -> None:
    """In chunks of the smallest size, as many rows at a time as the device takes."""
    backend, chunk = found.layer.backend, found.layer.backend.traits.smallest_prefill
    together = max(count for count in backend.traits.prefill_rows if count <= len(lengths))
    for begin in range(0, max(lengths), chunk):
        members = [row for row, length in enumerate(lengths) if length > begin]
        for first in range(0, len(members), together):
            some = members[first : first + together]
            found.step(
                [begin] * len(some),
                [min(chunk, lengths[row] - begin) for row in some],
                chunk,
                decode=False,
                members=some,
                pad_rows=together - len(some),
            )


@every_kind
def test_prompts_in_chunks_then_verify_steps_then_plain_ones(backend: DeviceBackend, kind: Kind) -> None:
    """Rows of all lengths over the ends of blocks; steps of one shape are one graph, whose lengths change."""
    block, chunk = backend.traits.block_size, backend.traits.smallest_prefill
    done = [2 * max(block, chunk) - 5, chunk, 3]
    found = texts(backend, kind, rows=3, length=max(done) + 20)
    with Called() as called:
        read_prompts(found, done)
    assert called.names == of_attention(backend, kind, decode=False)
    made = []
    for real, accepted in (([4, 1, 3], [2, 1, 3]), ([4, 4, 1], [4, 1, 1]), ([1, 2, 4], [1, 1, 3])):
        with Called() as called:
            found.step(done, real, 4, decode=True, pad_rows=1)
        assert made or called.names == of_attention(backend, kind, decode=True)
        made.append(compiled(backend))
        done = [start + count for start, count in zip(done, accepted, strict=True)]
        for row, start in enumerate(done):
            found.rejected(row, start)
    assert made[0] == made[1] == made[2], "wherever rows stand, a shape is one graph"
    for _ in range(2):
        found.step(done, [1, 1, 1], 1, decode=True, pad_rows=1)
        done = [start + 1 for start in done]


@pytest.mark.parametrize(
    ("kind", "is_fused"),
    [(Kind(heads=6), True), (Kind(window=200), True), (Kind(window=7), False), (Kind(sinks=True), False)],
    ids=["heads in groups", "a window that is longer", "a window", "sinks"],
)
def test_first_chunk_reads_no_cache_and_no_mask(backend: DeviceBackend, kind: Kind, is_fused: bool) -> None:
    """One of the rows is padding from its middle on."""
    if not backend.traits.causal_first_chunks:
        pytest.skip("this device masks first chunks like any other")
    chunk = backend.traits.smallest_prefill
    found = texts(backend, kind, rows=2, length=chunk)
    with Called() as called:
        found.step([0, 0], [chunk, chunk // 2], chunk, decode=False, pad_rows=1)
    made = [given for name, given in called.calls if name == "sdpa_fwd"]
    assert made, "more than one in compiled mode, which traces a region several times"
    for _, keys, _, mask, _, _, is_causal, *_ in made:
        assert (mask is None, is_causal, keys.shape[-2] == chunk) == (is_fused,) * 3


def test_float32_where_a_card_does_not_fuse_it(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated NPU's fused attention takes more than a card's, for the sake of comparisons."""
    if backend.traits.name != "ascend-emulated":
        pytest.skip("what this device fuses is what a card fuses")
    monkeypatch.setattr(backend.attention, "fused_dtypes", backend.attention.fused_dtypes - {torch.float32})
    test_prompts_in_chunks_then_verify_steps_then_plain_ones(backend, KINDS["heads in groups"])


@pytest.mark.parametrize(("start", "real"), [(2048, 2048), (1024, 1900)])
def test_a31_long_chunks_of_heads_in_groups(backend: DeviceBackend, start: int, real: int) -> None:
    """About as long as those in which a Gaudi 3 spoilt the heads of all groups but the first."""
    kind = Kind(heads=8, head_size=128, dtype=torch.bfloat16)
    found = texts(backend, kind, rows=1, length=start + real)
    found.compared_each = 61
    write_all(found, [start])
    found.step([start], [real], 2048, decode=False)


@pytest.mark.parametrize("queries", [1, 4])
@every_kind
def test_contexts_at_the_ends_of_blocks(backend: DeviceBackend, kind: Kind, queries: int) -> None:
    """The first steps after prompts that end there, all in one batch with a row of nothing but padding."""
    ends = [max(0, border * backend.traits.block_size + off) for border in (0, 1, 2) for off in (-1, 0, 1)]
    found = texts(backend, kind, rows=len(ends), length=max(ends) + queries)
    write_all(found, ends)
    found.step(ends, [queries] * len(ends), queries, decode=True, pad_rows=1)
    if backend.traits.flat_decode:
        found.in_place = True
        found.step(ends, [queries] * len(ends), queries, decode=True, pad_rows=1)


def write_all(found: Texts, lengths: list[int]) -> None:
    """What is cached, by one write; attention over it is tested elsewhere."""
    layer, longest = found.layer, max(lengths)
    upload = layer.backend.memory.upload
    key, value = (stored[:, :longest].flatten(0, 1) for stored in (found.keys, found.values))

    def write(starts_B: torch.Tensor, num_real_B: torch.Tensor, blocks: Any, key: Any, value: Any) -> None:
        tokens = torch.zeros((len(lengths), longest), dtype=torch.int32, device=starts_B.device)
        slots = build_rectangle(tokens, starts_B, num_real_B, blocks, layer.backend.row_operations).slots[0]
        layer.ops.write_kv(key, value, layer.kv_cache, slots, layer.spec)

    rows = list(range(len(lengths)))
    layer.backend.graphs.graph(write)(
        upload(torch.zeros(len(rows), dtype=torch.int32)),
        upload(torch.tensor(lengths, dtype=torch.int32)),
        found._blocks([0] * len(rows), [found.length] * len(rows), 0, rows, 0, decode=False),
        upload(key.contiguous()),
        upload(value.contiguous()) if layer.kind.value_size is None else None,
    )


@every_kind
def test_as_many_drafts_as_its_traits_allow(backend: DeviceBackend, kind: Kind) -> None:
    ends = [backend.traits.block_size - 3, 0]
    queries = 1 + backend.traits.max_drafts
    found = texts(backend, kind, rows=2, length=max(ends) + queries)
    write_all(found, ends)
    found.step(ends, [queries, 5], queries, decode=True)


@pytest.mark.parametrize("kind", [Kind(), LATENT, Kind(sinks=True)], ids=["heads in groups", "latent", "sinks"])
def test_the_dtypes_of_the_platform(backend: DeviceBackend, kind: Kind) -> None:
    from vllm.platforms import current_platform

    for dtype in current_platform.supported_dtypes:
        ends = [backend.traits.block_size + 9, 4]
        found = texts(backend, replace(kind, dtype=dtype), rows=2, length=max(ends) + 4)
        write_all(found, ends)
        found.step(ends, [4, 2], 4, decode=True)
        read_prompts(found, [backend.traits.smallest_prefill // 2, 3])


def test_nobody_sees_what_padding_writes(backend: DeviceBackend) -> None:
    """Steps of nothing but padding, whose slots are all the same few."""
    ends = [backend.traits.block_size + 3, 9]
    found = texts(backend, Kind(), rows=2, length=max(ends) + 1)
    write_all(found, ends)
    before = found.step([end - 1 for end in ends], [1, 1], 1, decode=True)
    for _ in range(2):
        found.step([], [], 4, decode=True, pad_rows=3)
    found.step([end - 1 for end in ends], [1, 1], 1, decode=True)
    assert before.shape[0] == 2


@pytest.mark.parametrize("poison", [float("nan"), 3e38])
@pytest.mark.parametrize("kind", [Kind(), LATENT, Kind(window=7)], ids=["plain", "latent", "a window"])
def test_r17_what_is_no_number_stays_with_its_row(backend: DeviceBackend, kind: Kind, poison: float) -> None:
    """In one batch with others, in the padding that it leaves, and in blocks that another row has later."""
    half = backend.traits.smallest_prefill // 2
    found = texts(backend, kind, rows=3, length=2 * half + 9)
    found.poison = poison
    read_prompts(found, [2 * half, half, 3])
    found.step([2 * half, half, 3], [4, 3, 1], 4, decode=True, pad_rows=1)
    found.step([2 * half + 4, half + 3, 4], [1, 1, 1], 1, decode=True, pad_rows=1)
    found.poison, found.table_BW = None, found.table_BW.roll(1, dims=0)
    read_prompts(found, [half, half - 3, 3])
    found.step([half, half - 3, 3], [2, 4, 1], 4, decode=True, pad_rows=1)
    found.step([half + 2, half + 1, 4], [1, 1, 1], 1, decode=True, pad_rows=1)


@pytest.mark.parametrize("decode", [True, False], ids=["verify steps", "prompt chunks"])
def test_layers_of_one_call(backend: DeviceBackend, decode: bool) -> None:
    """What they derive from it is shared by those alike, and by no others."""
    kinds = {
        "full": Kind(),
        "window": Kind(window=9),
        "full again": Kind(),
        "chunks": Kind(chunk=9),
        "soft": Kind(soft_cap=4.0),
    }
    rows, ends, queries = 2, [backend.traits.block_size + 3, 9], 3
    length = max(ends) + queries
    num_blocks = rows * -(-length // backend.traits.block_size) + 2
    caches = allocate(backend, kinds, num_blocks)
    each = {name: Texts(Layer(backend, kind, caches[name]), rows, length, num_blocks) for name, kind in kinds.items()}
    for found in each.values():
        write_all(found, ends)
    seen: dict[str, torch.Tensor] = {}

    def step(starts_B: torch.Tensor, real_B: torch.Tensor, blocks: Any, query: Any, key: Any, value: Any) -> Any:
        tokens = torch.zeros((rows, queries), dtype=torch.int32, device=starts_B.device)
        inputs = build_rectangle(tokens, starts_B, real_B, blocks, backend.row_operations)
        results = []
        for found in each.values():
            layer = found.layer
            layer.ops.write_kv(key, value, layer.kv_cache, inputs.slots[0], layer.spec)
            results.append(layer.ops.attend(query, layer.kv_cache, inputs.calls[0], layer.spec))
        return tuple(results)

    together = backend.graphs.graph(step)
    for name, found in each.items():
        # The layer's own step goes through all of them: with its inputs, its own result is right.
        index = list(each).index(name)
        found.layer.step = lambda *given, index=index: together(*given)[index]
        seen[name] = found.step(ends, [queries, 2], queries, decode=decode)
    assert not torch.equal(seen["full"], seen["soft"])
    assert torch.equal(seen["full"][1, :2], seen["full again"][1, :2])


def test_own_operations_are_called(backend: DeviceBackend) -> None:
    """A measured or quantized layer replaces operations, and the device's kernels must call its own."""
    if not backend.traits.takes_quant_config:
        pytest.skip(f"QUANT_CONFIG is refused on {backend.traits.name}")
    called: set[str] = set()
    ends = [backend.traits.block_size + 3, 9]
    found = texts(backend, Kind(), rows=2, length=max(ends) + 4, operations=Noted(called))
    read_prompts(found, ends)
    found.step(ends, [4, 2], 4, decode=True)
    assert called == set(OWN)


class Noted:
    """The plain operations, and which of them were asked for."""

    def __init__(self, called: set[str]) -> None:
        self._called = called

    def __getattr__(self, name: str) -> Any:
        self._called.add(name)
        return getattr(PLAIN, name)


@every_kind
def test_without_its_padding_a_rectangle_gives_the_same(backend: DeviceBackend, kind: Kind) -> None:
    """Where shapes may follow values, models compute real tokens only."""
    if backend.traits.captures:
        pytest.skip("shapes follow no values here")
    ends, real, queries = [backend.traits.block_size + 3, 0, 9, 0], [3, 1, 2, 0], 3
    found = texts(backend, kind, rows=4, length=max(ends) + queries)
    write_all(found, ends)
    layer = found.layer

    def step(starts_B: Any, num_real_B: Any, blocks: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        tokens = torch.zeros((len(starts_B), queries), dtype=torch.int32)
        inputs = build_rectangle(tokens, starts_B, num_real_B, blocks, layer.backend.row_operations)
        kept = Packed.from_counts(num_real_B, queries)
        places, call = kept.index_T, replace(inputs.calls[0], packed=kept, _plans={})
        own_value = None if value is None else value[places]
        layer.ops.write_kv(key[places], own_value, layer.kv_cache, inputs.slots[0][places], layer.spec)
        out = torch.zeros(*query.shape[:-1], kind.output_size, dtype=query.dtype)
        out[places] = layer.ops.attend(query[places], layer.kv_cache, call, layer.spec)
        return out

    layer.step = step
    found.step(ends, real, queries, decode=True)
