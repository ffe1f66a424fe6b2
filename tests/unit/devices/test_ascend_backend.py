"""The Ascend backend without a device: when it is chosen, what it refuses, and what it passes to graphs."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.attention_layers import call, layer
from tests.unit.test_config import backend_of, engine_config, here
from vllm_gaudi_spec import device_table, refusals
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, Spans
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.ascend import attention as ascend_attention
from vllm_gaudi_spec.devices.ascend import backend as ascend
from vllm_gaudi_spec.devices.ascend import device as ascend_device
from vllm_gaudi_spec.devices.ascend.attention import Bounds
from vllm_gaudi_spec.devices.ascend.graphs import HostLengthsOperation, NpuCaptures
from vllm_gaudi_spec.devices.base import Graphs, Memory
from vllm_gaudi_spec.devices.common.stream_device import Graphed

# --- when it is chosen ---


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in place of /dev, on a host that has all software and no other plugin."""
    monkeypatch.delenv("VGS_DEVICE", raising=False)
    monkeypatch.setattr(device_table, "other_platform_plugins", tuple)
    monkeypatch.setattr(device_table, "find_spec", lambda name: object())
    for name, pattern in (("hpu", "accel[0-9]*"), ("ascend", "davinci[0-9]*")):
        device = device_table.DEVICES[name]._replace(nodes=((str(tmp_path), pattern),))
        monkeypatch.setitem(device_table.DEVICES, name, device)
    device_table.has_card.cache_clear()
    yield tmp_path
    device_table.has_card.cache_clear()


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ((), "cpu"),
        (("davinci0", "davinci_manager"), "ascend"),
        (("davinci_manager",), "cpu"),
        (("accel0", "davinci0"), "hpu"),
    ],
)
def test_npu_is_chosen_when_a_card_is_present(nodes: tuple[str, ...], chosen: str, host: Path) -> None:
    for name in nodes:
        (host / name).touch()
    assert device_table.choose_device() == chosen


# --- what it refuses ---


@pytest.mark.parametrize(
    ("version", "torch_version", "variables", "why"),
    [
        ("2.10.0.post4", "2.10.1", {}, "torch_npu 2.10.0.post4 is installed, but .*pip install torch-npu==2.13.0"),
        ("2.13.0.post4", "2.13.1", {}, None),
        ("2.14.0", "2.14.1+cpu", {}, None),
        ("2.14.0", "2.13.0+cpu", {}, r"is for torch 2.14, but torch 2.13.0\+cpu is .*pip install torch-npu==2.13.0"),
        ("2.13.0", "2.11.0+cpu", {}, r"is for torch 2.13, but torch 2.11.0\+cpu is .*pip install torch==2.13.0"),
        ("2.13.0", "2.13.1", {"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING=1.*unset it"),
        ("2.13.0", "2.13.1", {"TASK_QUEUE_ENABLE": "2"}, "TASK_QUEUE_ENABLE=2.*set it to 1"),
        (
            "2.13.0",
            "2.13.1",
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,pin_memory_expandable_segments: True"},
            "pin_memory_expandable_segments.*PYTORCH_NPU_ALLOC_CONF",
        ),
        ("2.13.0", "2.13.1", {"TASK_QUEUE_ENABLE": "1", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, None),
    ],
)
def test_npu_s01_v01_g04_g05_unusable_torch_npu_is_refused(
    version: str, torch_version: str, variables: dict[str, str], why: str | None
) -> None:
    """It crashes, is for another torch, or captures nothing with these settings."""
    refused = ascend_device.refusal(version, variables, torch_version)
    assert (refused is None) if why is None else (refused is not None and re.search(why, refused))


@pytest.mark.parametrize(("ranks", "mode", "refused"), [(2, "AIV", True), (1, "AIV", False), (2, "HOST", False)])
def test_npu_g13_collectives_on_vector_cores_are_refused(
    ranks: int, mode: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_gaudi_spec.devices.ascend import platform

    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", mode)
    monkeypatch.setattr(platform.CapturingPlatform, "check_and_update_config", lambda config: None)
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=ranks))
    if not refused:
        platform.AscendSpecPlatform.check_and_update_config(config)
        return
    with pytest.raises(
        UnsupportedConfigError, match=r"HCCL_OP_EXPANSION_MODE=AIV is not supported with several ranks.*unset it"
    ):
        platform.AscendSpecPlatform.check_and_update_config(config)


@pytest.mark.parametrize(
    ("name", "number", "served"),
    [
        ("Ascend910A", 102, False),
        ("Ascend310P3", 202, False),
        ("Ascend910B3", 223, True),
        ("Ascend310B1", 240, False),
        ("Ascend910_9391", 250, True),
        ("Ascend950PR", 260, True),
    ],
)
def test_npu_s14_cards_without_fused_attention_are_refused(
    name: str, number: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_gaudi_spec.devices.ascend.platform import AscendSpecPlatform

    chosen: list[torch.device] = []
    npu = SimpleNamespace(get_soc_version=lambda: number, get_device_name=lambda: name, set_device=chosen.append)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    with nullcontext() if served else pytest.raises(UnsupportedConfigError, match=f"{name} has no.*use vllm-ascend"):
        AscendSpecPlatform.set_device(torch.device("cpu"))
    assert len(chosen) == 1


def unopened() -> Any:
    traits = ascend.make_traits("ascend", torch.device("cpu"))
    return SimpleNamespace(traits=traits, weights=ascend.AscendWeights(Memory()))


def test_formats_without_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine_config(tmp_path, None)
    refusals.refuse_unsupported(made, unopened())
    made.model_config.quantization = "fp8"
    refusals.refuse_unsupported(made, backend_of("cpu"))
    with pytest.raises(
        UnsupportedConfigError, match=r"--quantization fp8 names a format for which there are no kernels yet"
    ):
        refusals.refuse_unsupported(made, unopened())
    made.model_config.quantization = None
    drafting = engine_config(tmp_path, here(dict(method="draft_model"), tmp_path))
    drafting.speculative_config.draft_model_config.quantization = "fp8"
    with pytest.raises(UnsupportedConfigError, match=r"^quantization fp8 in --speculative-config .* ascend"):
        refusals.refuse_unsupported(drafting, unopened())
    path = tmp_path / "quant.json"
    path.write_text('{"mode": "MEASURE", "dump_stats_path": "x"}')
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    with pytest.raises(UnsupportedConfigError, match="QUANT_CONFIG is not supported on device ascend; unset it"):
        refusals.refuse_unsupported(made, unopened())


# --- which layers the fused attention takes ---


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({}, True),
        (dict(dtype=torch.float16), True),
        (dict(dtype=torch.float32), False),
        (dict(sliding_window=100), True),
        (dict(logits_soft_cap=30.0), False),
        (dict(block_size=16), False),
        (dict(block_size=640), False),
        (dict(head_size=40), False),
        (dict(head_size=576), False),
        (dict(value_size=32), False),
        (dict(layer_operations=True), False),
        (dict(num_heads=130), False),
        (dict(num_heads=320, num_kv_heads=64), False),
        (dict(num_heads=512, num_kv_heads=512, head_size=128), False),
    ],
)
def test_layers_supported_by_the_fused_operation(changes: dict[str, Any], fused: bool) -> None:
    assert ascend_attention.takes(layer(**changes), 4, 1024, ascend.FUSED_DTYPES) is fused


def test_single_query_over_longest_context_is_not_fused() -> None:
    for num_queries, num_keys, fused in ((1, 262_144, True), (1, 262_272, False), (2, 262_272, True)):
        assert ascend_attention.takes(layer(), num_queries, num_keys, ascend.FUSED_DTYPES) is fused


class Issued(NamedTuple):
    arguments: dict[str, Any]
    lengths: Any
    out: list[torch.Tensor]


def issued_by(asked: AttentionCall, num_blocks: int, spec: AttentionLayerSpec, **options: Any) -> list[Issued]:
    """Return what attention issues for a call over a cache of `num_blocks` blocks."""
    found: list[Issued] = []
    captures = SimpleNamespace(issue=lambda fused, *given: found.append(Issued(*given)))
    blocks = torch.zeros(num_blocks, 128, 2, 64)
    cache = SimpleNamespace(blocks=lambda: (blocks, blocks))
    query = torch.zeros(asked.num_rows * asked.num_queries, 8, 64)
    ascend_attention.attend(None, captures, query, cache, asked, spec, **options)
    return found


def issued(num_blocks: int, *, rows: int = 1, width: int = 1, adds_up_blocks: bool = False) -> list[Issued]:
    """Return what attention with one query per row issues for tables of `width` blocks."""
    decode = call([0] * rows, [[0] * width] * rows, host_lengths_B=torch.arange(1, rows + 1))
    first, second = (issued_by(decode, num_blocks, layer(), adds_up_blocks=adds_up_blocks) for _ in range(2))
    assert all(one.lengths is other.lengths for one, other in zip(first, second, strict=True)), "layers share them"
    return first


def test_npu_a01_the_order_of_queries_and_keys_is_left_to_the_mask() -> None:
    """The arguments say so explicitly: a build with other defaults would read the first keys of a row only."""
    (one,) = issued(2)
    assert one.arguments["pre_tokens"] == one.arguments["next_tokens"] == 2**31 - 1
    assert one.arguments["atten_mask"].tolist() == [[[[False] + [True] * 127]]]


def test_npu_a04_rows_are_split_when_their_blocks_may_exceed_the_cache() -> None:
    """Rows with a shared prefix may exceed it. A run has as many rows as cannot."""
    (whole,) = issued(11, rows=5, width=5)
    assert (whole.lengths.rows, whole.lengths.longest) == (slice(0, 5), 640)
    parts = issued(11, rows=5, width=5, adds_up_blocks=True)
    longest = [part.lengths.get_longest_arguments()["actual_seq_lengths_kv"] for part in parts]
    assert [len(lengths) for lengths in longest] == [2, 2, 1]
    for part, lengths in zip(parts, longest, strict=True):
        assert sum(lengths) <= 11 * 128
        num = len(lengths)
        shapes = [part.arguments[name].shape[0] for name in ("query", "atten_mask", "block_table")]
        assert [*shapes, part.out[0].shape[0]] == [num] * 4
    (narrow,) = issued(3, rows=1, width=5, adds_up_blocks=True)
    assert narrow.lengths.longest == 3 * 128, "no row has more keys than there are"


def chunks(num_queries: int = 8, **changes: Any) -> AttentionCall:
    """A prompt chunk of 5 tokens after 200, a whole chunk of `num_queries`, and a row of padding."""
    lengths, counts = torch.tensor([[205, num_queries, 1], [5, num_queries, 0]], dtype=torch.int32)
    given = dict(host_lengths_B=lengths, host_counts_B=counts) | changes
    return call([200, 0, 0], [[1, 2], [3, 0], [0, 0]], num_queries, **given)


@pytest.mark.parametrize(
    ("asked", "changes", "taken"),
    [
        (chunks(), {}, True),
        (chunks(), dict(sliding_window=100), True),
        (chunks(), dict(head_size=512), False),
        (chunks(), dict(attention_chunk=64), False),
        (chunks(num_queries=1), {}, False),
        # A decode, for which the host has bounds only.
        (chunks(host_counts_B=None), {}, False),
        # Bidirectional images need a mask of their own.
        (chunks(spans=Spans(torch.zeros(3, 8, dtype=torch.int32))), {}, False),
    ],
    ids=str,
)
def test_calls_with_compressed_masks(asked: AttentionCall, changes: dict[str, Any], taken: bool) -> None:
    assert ascend_attention.takes_compressed_masks(layer(**changes), asked) is taken


def issued_chunks(num_blocks: int = 8, *, compressed: bool = True, **changes: Any) -> list[Issued]:
    options = dict(adds_up_blocks=changes.pop("adds_up_blocks", False), mask=torch.zeros(1) if compressed else None)
    return issued_by(chunks(), num_blocks, layer(**changes), **options)


def test_npu_a06_a07_a22_chunks_and_their_padding_are_rows() -> None:
    """Every query belongs to a row, including padding, and every row has keys."""
    (one,) = issued_chunks()
    assert one.lengths.get_current_arguments() == {
        "actual_seq_lengths": [5, 8, 16, 16, 16, 24],
        "actual_seq_lengths_kv": [205, 1, 8, 1, 1, 1],
    }
    assert one.lengths.get_longest_arguments() == {
        "actual_seq_lengths": [8, 8, 16, 16, 24, 24],
        "actual_seq_lengths_kv": [256, 1] * 3,
    }
    assert one.arguments["query"].shape == one.out[0].shape == (24, 8, 64)
    assert one.arguments["block_table"].tolist() == [[1, 2], [1, 2], [3, 0], [3, 0], [0, 0], [0, 0]]


def test_npu_a12_a33_forms_of_chunks() -> None:
    """A window has the last 100 keys, including a query's own. Chunks go to the kernel that others use, which supports
    heads of up to 256; correction of queries without keys is for dense masks."""
    (whole,), (window,) = issued_chunks(), issued_chunks(sliding_window=100)
    forms = [
        tuple(part.arguments[name] for name in ("input_layout", "sparse_mode", "pre_tokens", "next_tokens"))
        for part in (whole, window)
    ]
    assert forms == [("TND", 3, 2**31 - 1, 2**31 - 1), ("TND", 4, 99, 0)]
    (rectangle,) = issued_chunks(compressed=False)
    assert rectangle.arguments["input_layout"] == "BSND"
    assert [part.arguments["inner_precise"] for part in (whole, rectangle)] == [0, 2]


def test_npu_a04_chunks_are_split_when_their_blocks_may_exceed_the_cache() -> None:
    """Their padding has a block as well."""
    parts = issued_chunks(7, adds_up_blocks=True)
    assert [part.lengths.rows for part in parts] == [slice(0, 2), slice(2, 3)]
    assert [len(part.arguments["query"]) for part in parts] == [len(part.out[0]) for part in parts] == [16, 8]
    assert [len(part.arguments["block_table"]) for part in parts] == [4, 2]
    assert parts[1].lengths.get_current_arguments() == {"actual_seq_lengths": [0, 8], "actual_seq_lengths_kv": [1, 1]}
    for part in issued_chunks(2, adds_up_blocks=True):
        assert sum(part.lengths.get_longest_arguments()["actual_seq_lengths_kv"]) <= 2 * 128, "no more than there are"


def fused(refusal: str | None) -> Any:
    def run(*given: Any, **named: Any) -> None:
        if refusal:
            raise RuntimeError(refusal)

    return SimpleNamespace(npu_fused_infer_attention_score=run)


def test_npu_v06_the_card_is_asked_whether_it_adds_up_blocks() -> None:
    host = torch.device("cpu")
    refusal = "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002"
    assert ascend_attention.adds_up_blocks(fused(refusal), host, layer(), 2)
    assert not ascend_attention.adds_up_blocks(fused(None), host, layer(), 2)
    assert ascend_attention.adds_up_blocks(fused(refusal), host, layer(), 2, torch.zeros(1))
    with pytest.raises(RuntimeError, match="507011"):
        ascend_attention.adds_up_blocks(fused("507011"), host, layer(), 1)
    asked: list[dict[str, Any]] = []
    own = SimpleNamespace(
        npu_fused_infer_attention_score=lambda query, *_, **named: asked.append(named | dict(q=query))
    )
    ascend_attention.adds_up_blocks(own, host, layer(head_size=96, block_size=64), 2)
    assert (asked[0]["q"].shape, asked[0]["num_key_value_heads"], asked[0]["block_size"]) == ((2, 2, 8, 96), 2, 64)


class Card:
    """Checks prompt chunks as the older kernel of CANN does: some head sizes, and bfloat16 alone."""

    def __init__(self, *, takes_padding: bool) -> None:
        self.takes_padding = takes_padding
        self.asked = 0

    def npu_fused_infer_attention_score(self, query: torch.Tensor, *given: Any, **named: Any) -> None:
        self.asked += 1
        if named["input_layout"] != "TND":
            return
        sizes = (64, 128) if named["sparse_mode"] == 4 else (64, 128, 192)
        queries = np.diff([0, *named["actual_seq_lengths"]])
        fits = self.takes_padding or (queries <= named["actual_seq_lengths_kv"]).all()
        if query.shape[-1] not in sizes or query.dtype != torch.bfloat16 or not fits:
            raise RuntimeError("call aclnnFusedInferAttentionScoreV3 failed, error code is 561002")


@pytest.mark.parametrize(
    ("changes", "takes_padding", "layout"),
    [
        ({}, True, "TND"),
        ({}, False, "BSND"),
        (dict(head_size=128, sliding_window=100), True, "TND"),
        (dict(head_size=192), True, "TND"),
        (dict(head_size=192, sliding_window=100), True, "BSND"),
        (dict(head_size=96), True, "BSND"),
        (dict(head_size=256), True, "BSND"),
        (dict(dtype=torch.float16), True, "BSND"),
    ],
)
def test_npu_a32_unsupported_chunks_use_dense_masks(changes: dict[str, Any], takes_padding: bool, layout: str) -> None:
    """The card is asked once for all layers of a kind."""
    issued: list[dict[str, Any]] = []
    captures = SimpleNamespace(issue=lambda fused, arguments, lengths, out: issued.append(arguments))
    npu = Card(takes_padding=takes_padding)
    card = SimpleNamespace(torch_npu=npu, torch_device=torch.device("cpu"), captures=captures)
    attention = ascend.AscendAttention(card, ascend.FUSED_DTYPES)
    attention.__dict__["_fused"] = HostLengthsOperation(print, torch.empty)
    spec = layer(**changes)
    blocks = torch.zeros(8, 128, 2, spec.head_size, dtype=spec.dtype)
    cache = SimpleNamespace(blocks=lambda: (blocks, blocks))
    query = torch.zeros(24, 8, spec.head_size, dtype=spec.dtype)
    attention.attend(query, cache, chunks(), spec)
    asked = npu.asked
    attention.attend(query, cache, chunks(), spec)
    assert [arguments["input_layout"] for arguments in issued] == [layout] * 2
    assert npu.asked == asked == 2
    assert [(form[-1], adds_up) for form, adds_up in attention._adds_up.items()] == [(layout == "TND", False)]


@pytest.mark.parametrize(("num_tokens", "written"), [(256, [256]), (300, [256, 44])])
def test_npu_a34_more_tokens_than_the_cache_has_slots(num_tokens: int, written: list[int]) -> None:
    """The profile run has a small cache and the largest steps."""
    sizes: list[int] = []

    def scatter(key: Any, value: Any, keys: Any, values: Any, slots: Any, cache_mode: str) -> None:
        assert len(key) == len(value) == len(slots) <= keys.shape[0] * keys.shape[1]
        keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = key, value
        sizes.append(len(slots))

    npu = SimpleNamespace(npu_scatter_pa_kv_cache=scatter)
    card = SimpleNamespace(torch_npu=npu, torch_device=None, captures=None)
    keys, values = torch.zeros(2, 2, 128, 2, 64, dtype=torch.bfloat16)
    cache = SimpleNamespace(blocks=lambda: (keys, values))
    tokens = torch.arange(num_tokens, dtype=torch.bfloat16)[:, None, None].expand(-1, 2, 64)
    slots = (torch.arange(num_tokens) + 128) % 256
    ascend.AscendAttention(card, ascend.FUSED_DTYPES).write_kv(tokens, -tokens, cache, slots, layer())
    assert sizes == written
    last = torch.empty(256, 2, 64, dtype=torch.bfloat16)
    last[slots[:256]] = tokens[:256]
    last[slots[256:]] = tokens[256:]
    assert keys.flatten(0, 1).equal(last)
    assert values.flatten(0, 1).equal(-last)


# --- what it gives to graphs ---


class PlayedRuntime:
    """Records the calls of `torch.npu`. A graph is a function that is called at replay."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self._current = self.main = self.Stream()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("graph_task"):
            raise AttributeError(name)
        return lambda *given: self.asked.append((name, *given)) or "handle"

    def graph_pool_handle(self) -> str:
        return "pool"

    def memory_reserved(self) -> int:
        return 0

    memory_allocated = memory_reserved

    def mem_get_info(self) -> tuple[int, int]:
        return 1, 1

    def current_stream(self) -> Any:
        return self._current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def Stream(self) -> Any:
        stream = SimpleNamespace()
        stream.wait_event = lambda event: self.asked.append(("wait", event, stream))
        return stream

    def Event(self) -> Any:
        event = SimpleNamespace()
        event.record = lambda stream=None: self.asked.append(("record", event, stream or self._current))
        return event

    def NPUGraph(self) -> Any:
        return SimpleNamespace(
            capture_begin=lambda **given: None, capture_end=lambda: None, replay=lambda: self.asked.append("replay")
        )


def test_npu_g08_h02_bounds_are_updated_when_a_row_needs_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are updated on a stream of their own, after the graph's last run and before its next."""
    kept: list[int] = []

    def place_of(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(id(found := tensor.detach()))
        return found

    torch_npu = SimpleNamespace(_C=SimpleNamespace(_weak_ref_tensor=place_of))
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    runtime = PlayedRuntime()
    captures = NpuCaptures(runtime, torch.device("cpu"))

    def run(
        query: torch.Tensor, actual_seq_lengths_kv: list[int], workspace: torch.Tensor, out: list[torch.Tensor]
    ) -> None:
        is_update = ("graph_task_update_begin", runtime.current_stream(), "handle") in runtime.asked[-1:]
        assert all((id(tensor) in kept) == is_update for tensor in (query, workspace, *out)), "places, not tensors"
        runtime.asked.append(actual_seq_lengths_kv)
        out[0].copy_(query)

    workspaces = []

    def workspace(query: torch.Tensor, actual_seq_lengths_kv: list[int]) -> torch.Tensor:
        workspaces.append(actual_seq_lengths_kv)
        return torch.empty(0)

    operation = HostLengthsOperation(run, workspace)

    def step(query: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        out, bounds = torch.empty_like(query), Bounds(lengths_B, slice(0, 2), 128, 300)
        for _ in range(2):
            captures.issue(operation, dict(query=query), bounds, [out])
        return out

    graphed = Graphed(step, captures)

    def updated_lengths(*lengths: int) -> list[Any]:
        runtime.asked.clear()
        graphed(torch.ones(2), torch.tensor(lengths, dtype=torch.int32))
        return [asked if isinstance(asked, list | str) else asked[0] for asked in runtime.asked]

    recorded = ["graph_task_group_begin", [128, 128], "graph_task_group_end"]
    assert updated_lengths(3, 4) == [[128, 128], [128, 128], *recorded, *recorded]
    assert updated_lengths(128, 6) == ["replay", "record"], "nothing to update: no row needs another block"
    update = ["graph_task_update_begin", [128, 256], "graph_task_update_end"]
    updated = ["wait", *update, *update, "record", "wait", "replay", "record"]
    assert updated_lengths(128, 129) == updated
    assert updated_lengths(3, 256) == ["replay", "record"]
    assert updated_lengths(1, 1)[2] == [128, 128], "shorter rows as well"
    assert updated_lengths(1, 290)[2] == [128, 300], "up to the end of the table and not beyond"
    (_, done, updates), (_, updated, by), (_, awaited, runs), (_, done_again, at) = (
        asked for asked in runtime.asked if asked[0] in ("wait", "record")
    )
    assert (done_again, awaited) == (done, updated)
    assert updates is by
    assert runs is at is runtime.main
    assert updates is not runtime.main
    assert len(captures.names) == 1, "lengths make no graph"
    assert workspaces == [[300, 300]] * 4, "room for the longest rows, whatever the lengths of now"


@pytest.mark.parametrize(
    "message",
    [
        "ACL error 207008: stream resources are insufficient",
        "EL0005: alloc sq cq fail",
        "resource alloc fail stream wait event failed",
    ],
)
def test_npu_g06_g07_s10_error_without_room_for_graphs_names_the_remedy(message: str) -> None:
    captures = NpuCaptures(PlayedRuntime(), torch.device("cpu"))

    def full() -> None:
        raise RuntimeError(message)

    captures.record(lambda: None)
    with pytest.raises(UnsupportedConfigError, match=r"no room for more than 0 graphs.*batch_buckets and prefill_buck"):
        captures.record(full)


class CardMemory:
    """`torch.npu` of a card with 1,000 bytes.

    A run takes 300 from torch's allocator, which keeps them, and CANN takes 50.
    """

    def __init__(self) -> None:
        self.allocated, self.peak, self.cached, self.of_cann = 100, 700, 200, 0

    def mem_get_info(self) -> tuple[int, int]:
        return 1000 - self.allocated - self.cached - self.of_cann, 1000

    def memory_allocated(self) -> int:
        return self.allocated

    def memory_reserved(self) -> int:
        return self.allocated + self.cached

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def empty_cache(self) -> None:
        self.cached = 0

    def synchronize(self) -> None: ...

    def run(self) -> None:
        self.peak, self.cached, self.of_cann = 400, max(self.cached, 300), 50


def test_npu_m03_the_peak_is_read_before_memory_is_given_back() -> None:
    """Two runs give the same result: the second one reuses what the first left in the allocator's cache, and CANN keeps
    its memory."""
    card = CardMemory()
    memory = ascend.AscendMemory(card, torch.device("cpu"), Graphs())
    assert memory.measure_peak(card.run) == 350
    assert memory.measure_peak(card.run) == 350
    assert memory.measure_peak(lambda: None) == 50


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("NPU out of memory. Tried to allocate 100.00 GiB (NPU 0; 60.97 GiB total capacity; 0 bytes", 100 << 30),
        ("NPU out of memory. NPUWorkspaceAllocator tried to allocate 1.50 MiB(NPU 0; 60.97 GiB total", 3 << 19),
        ("NPU out of memory. Tried to allocate more than 1EB memory.", 0),
        ("NPU function error: call aclnnMm failed, error code is 207018", 0),
        ("NPU function error: call aclnnMm failed, error code is 561002", None),
    ],
)
def test_size_of_a_failed_allocation(text: str, asked: int | None) -> None:
    """The messages are those of torch_npu 2.13.0's allocators. CANN has only a code."""
    memory = ascend.AscendMemory(None, torch.device("cpu"), Graphs())
    assert memory.bytes_asked(RuntimeError(text)) == asked
