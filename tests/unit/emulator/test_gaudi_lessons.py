"""What others learned on real Gaudis, as the emulated one shows it. docs/gaudi_lessons.md has the rows by number.

Where `refused` is called, the refusal is seen to be of the hostile card alone.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from card_emulator.testing import graph, hpu, ids
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, FlatBlocks
from vllm_gaudi_spec.devices.common.kv_pair import KVPair
from vllm_gaudi_spec.recurrent.scans import scan


def refused(card: Any, run: Callable[[], Any], words: str) -> None:
    """By a hostile card, and not by a kind one."""
    with pytest.raises(RuntimeError, match=words):
        run()
    card.hostile = False
    run()
    card.hostile = True


def falls_back(card: Any, run: Callable[[], Any]) -> None:
    """To the host: counted, and the end of a capture."""
    before = card.counters.fallbacks
    run()
    assert card.counters.fallbacks == before + 1
    with pytest.raises(RuntimeError, match="falls back to the CPU"):
        graph(lambda x: run())(hpu(1))
    card.blocked, card.hostile = None, False
    run()
    assert card.counters.fallbacks == before + 1
    card.hostile = True


# --- start-up ---


def test_s12_properties_of_the_card_are_not_known(card: Any) -> None:
    with pytest.raises(NotImplementedError, match="mem_get_info"):
        torch.hpu.get_device_properties()


@pytest.mark.parametrize("generation", ["gaudi2", "gaudi3"])
def test_s13_the_generation_is_not_read_from_a_name(
    card: Any, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from card_emulator.gaudi.models import MODELS
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    monkeypatch.setattr(card, "model", MODELS[generation])
    card.console = True
    assert torch.hpu.get_device_name() != generation.upper()
    assert torch.hpu.get_device_name().endswith(generation.upper())
    assert make_backend().weights.fp8_range == generation


def test_q01_a_card_that_is_neither_has_the_narrower_range(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import habana_frameworks.torch.utils.experimental as htexp

    from vllm_gaudi_spec.devices.hpu.backend import make_backend
    from vllm_gaudi_spec.quantization.layers import kv_range

    monkeypatch.setattr(htexp, "_get_device_type", lambda: None)
    assert kv_range(make_backend().weights.fp8_range) == "gaudi2"


def test_h03_pinned_memory_needs_an_opened_card(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "pid", 0)
    refused(card, lambda: torch.empty(2, pin_memory=True), "before the device was opened")
    torch.zeros(1, device="hpu")
    assert torch.empty(2, pin_memory=True).is_pinned()


@pytest.mark.parametrize(
    "choose",
    [lambda: torch.hpu.stream(torch.hpu.Stream()).__enter__(), lambda: torch.hpu.set_stream(torch.hpu.Stream())],
)
def test_s18_l08_a_capture_stays_on_its_stream(card: Any, choose: Callable[[], Any]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        choose()
        return x + 1

    with pytest.raises(RuntimeError, match="another stream is chosen"):
        graph(forward)(hpu(1))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64])
def test_s19_o35_types_that_do_not_exist(card: Any, dtype: torch.dtype) -> None:
    refused(card, lambda: torch.zeros(2, dtype=dtype, device="hpu"), "does not exist")
    refused(card, lambda: torch.zeros(2, dtype=dtype).to("hpu"), "does not exist")


def test_s22_attention_computes_in_inference_mode(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q = torch.zeros(1, 1, 2, 8, device="hpu")

    def train() -> None:
        with torch.inference_mode(False):
            FusedSDPA.apply(q, q, q)

    refused(card, train, "recompute")
    FusedSDPA.apply(q, q, q)


def test_s27_a_release_without_the_attention_kernel_starts(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    kernels = importlib.import_module("habana_frameworks.torch.hpex.kernels")
    monkeypatch.delattr(kernels, "FusedSDPA")
    assert make_backend().attention is not None


def test_s03_h15_the_mode_is_that_in_which_the_bridge_was_loaded(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.config import UnsupportedConfigError
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    with pytest.raises(UnsupportedConfigError, match="export PT_HPU_LAZY_MODE=0 before Python starts"):
        make_backend()


def test_s28_a_card_belongs_to_one_process(card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For locks of files, another opening of the same file is another holder."""
    from card_emulator.gaudi import ownership
    from vllm_gaudi_spec import environment

    def use(modules: str) -> None:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", modules)
        monkeypatch.setattr(card, "pid", 0)
        monkeypatch.setattr(card, "acquire", partial(ownership.acquire, tmp_path, environment.emulated_modules()))
        torch.zeros(1, device="hpu")

    monkeypatch.setattr(ownership, "_locked", [])
    use("3")
    refused(card, lambda: use("3"), "synStatus=20 .Device already acquired.")
    use("3,4")
    for file in ownership._locked:
        os.close(file)
    ownership._locked.clear()
    use("3")
    os.close(ownership._locked.pop())
    monkeypatch.delenv("HABANA_VISIBLE_MODULES")
    assert environment.emulated_modules() == ()


# --- lazy mode ---


@pytest.mark.parametrize(
    ("every", "recipes", "different"),
    [
        # What comes before the layers, and what comes after, is with the layer beside it.
        (1, 5, 3),
        (2, 3, 3),
        (0, 1, 1),
    ],
)
def test_l12_equal_layers_are_one_recipe(card: Any, every: int, recipes: int, different: int) -> None:
    """Of four layers with a norm before and a projection after them; lists inside of layers are none of layers."""
    from torch import nn
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from card_emulator.gaudi import habana
    from vllm_gaudi_spec.devices.hpu.backend import mark_layers

    class Attention(nn.Module, AttentionLayerBase):
        def get_attn_backend(self) -> Any: ...

        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.softmax(-1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleList([Attention(), Attention()])
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in (*self.attention, *self.experts):
                x = part(x)
            return x

    layers = nn.ModuleList([Layer() for _ in range(4)])
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "layers": layers, "output": nn.Linear(4, 8)}).to("hpu")
    mark_layers(model, habana.mark_step, every)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model["norm"](x)
        for one in layers:
            x = one(x)
        return torch.Tensor(model["output"](x))

    with torch.inference_mode():
        expected = forward(torch.ones(2, 4, device="hpu")).cpu()
        run = graph(forward)
        for _ in range(2):
            assert torch.equal(run(torch.ones(2, 4, device="hpu")).cpu(), expected)
    assert card.graphs[-1].recipes == recipes
    assert len(card.graph_recipes) == different


def test_l19_copies_of_changing_lengths_are_recipes_each(card: Any) -> None:
    """Of whole rows, one."""
    source, target = torch.zeros(8, device="hpu"), torch.zeros(8, device="hpu")
    card.mark_step()
    compiled = []
    for copy in (lambda n: target[:n].copy_(source[:n]), lambda n: target.copy_(source)):
        before = card.counters.lazy_compiles
        for length in range(2, 6):
            copy(length)
            card.mark_step()
        compiled.append(card.counters.lazy_compiles - before)
    assert compiled == [4, 1]


def test_l27_o05_index_select_has_five_dimensions(card: Any) -> None:
    falls_back(card, lambda: torch.zeros(1, 1, 1, 1, 2, 1, device="hpu").index_select(4, ids_of_one()))
    before = card.counters.fallbacks
    torch.zeros(1, 1, 1, 2, 1, device="hpu").index_select(3, ids_of_one())
    assert card.counters.fallbacks == before


def test_l27_matmul_has_five_dimensions(card: Any) -> None:
    def product(*dims: int) -> torch.Tensor:
        return torch.ones(*dims, 2, 3, device="hpu") @ torch.ones(*dims, 3, 2, device="hpu")

    refused(card, lambda: product(1, 1, 1, 2), "6 dimensions")
    assert product(1, 1, 2).cpu().eq(3).all()


@pytest.mark.parametrize("num_decays", [1, 4])
def test_l27_recurrences_have_five_dimensions(card: Any, num_decays: int) -> None:
    keys = torch.ones(1, 8, 1, 4, device="hpu")
    decay, state = torch.zeros(1, 8, 1, num_decays, device="hpu"), torch.zeros(1, 1, 4, 4, device="hpu")
    out, _ = scan(keys, keys / 2, keys, decay, state, torch.ones(1, 8, 1, device="hpu"))
    torch.testing.assert_close(out.cpu(), torch.full((1, 8, 1, 4), 2.0))


def ids_of_one() -> torch.Tensor:
    return torch.ones(1, dtype=torch.int64, device="hpu")


@pytest.mark.parametrize("how", ["tensors", "graphs"])
def test_l30_r08_r16_nothing_goes_on_without_memory(card: Any, how: str) -> None:
    """And of a graph's workspace the words are those of a card."""
    x = hpu(1, 2)
    if how == "tensors":
        too_much(card)
    else:
        card.graph_reserve = 4
        with pytest.raises(torch.OutOfMemoryError, match="PT_SYNHELPER workspace Allocation of size ::8 failed!"):
            graph(lambda x: x + 1)(x)
    with pytest.raises(RuntimeError, match="ran out of memory before"):
        x + 1
    card.blocked, card.hostile = None, False
    too_much(card)
    x + 1


def too_much(card: Any) -> None:
    card.compile_only = True  # so that the host allocates nothing
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 << 30, dtype=torch.uint8, device="hpu")
    card.compile_only = False


@pytest.mark.parametrize(("generation", "gib"), [("gaudi2", 94.62), ("gaudi3", 126.5)])
def test_r03_what_the_allocator_offers(card: Any, generation: str, gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from card_emulator.gaudi.models import MODELS

    monkeypatch.setattr(card, "model", MODELS[generation])
    assert torch.hpu.mem_get_info()[1] == int(gib * 2**30)


# --- operators ---


@pytest.mark.parametrize(
    "run",
    [
        lambda x, rows: x.index_reduce_(0, rows, x.clone(), "mean"),
        lambda x, rows: x.index_reduce_(1, rows, x.clone(), "amax"),
        lambda x, rows: x.index_reduce(0, rows, x, "amax", include_self=False),
    ],
)
def test_o03_index_reduce_in_one_form(card: Any, run: Callable[..., Any]) -> None:
    falls_back(card, lambda: run(torch.zeros(2, 2, device="hpu"), torch.arange(2, device="hpu")))
    torch.zeros(2, 2, device="hpu").index_reduce_(0, ids(0, 1), torch.ones(2, 2, device="hpu"), "amax")
    assert card.counters.fallbacks == 1


def test_o04_index_reduce_of_single_lanes(card: Any) -> None:
    x = torch.zeros(2, 1, device="hpu")
    refused(card, lambda: x.index_reduce_(0, ids(0, 1), x.clone(), "amax"), "last dimension of 1")


def test_o04_attention_of_one_head_and_one_query(card: Any) -> None:
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    kv = KVPair(*(torch.ones(32, 1, 8, device="hpu") for _ in range(2)), 16)
    zero = torch.zeros(1, dtype=torch.int32, device="hpu")
    call = AttentionCall(
        num_rows=1,
        num_queries=1,
        starts_B=zero,
        block_table_BW=zero.view(1, 1),
        flat=FlatBlocks(zero + 1, zero, zero),
    )
    out = make_backend().attention.attend(torch.ones(1, 1, 8, device="hpu"), kv, call, one_head(torch.float32, "llama"))
    assert out.flatten().tolist() == [1.0] * 8


def one_head(dtype: torch.dtype, model_type: str) -> AttentionLayerSpec:
    return AttentionLayerSpec(
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        scale=1.0,
        sliding_window=None,
        logits_soft_cap=0.0,
        dtype=dtype,
        block_size=16,
        model_type=model_type,
    )


def test_o06_where_by_booleans(card: Any) -> None:
    x = hpu(1, 2)
    byte = torch.ones(2, dtype=torch.uint8, device="hpu")
    with pytest.warns(UserWarning, match="uint8"):
        refused(card, lambda: torch.where(byte, x, -x), "only by booleans")


@pytest.mark.parametrize(("shape", "dim"), [((40, 2), 0), ((2, 37), 1)])
def test_o07_stable_sorts(card: Any, shape: tuple[int, int], dim: int) -> None:
    falls_back(card, lambda: torch.zeros(shape, device="hpu").sort(dim=dim, stable=True))
    before = card.counters.fallbacks
    torch.zeros(2, 38, device="hpu").sort(dim=1, stable=True)
    assert card.counters.fallbacks == before


def test_o08_topk_is_sorted(card: Any) -> None:
    x = hpu(3, 1, 2)
    refused(card, lambda: x.topk(2, sorted=False), "unsorted output not supported")


def test_o09_which_of_equal_values_is_found_is_not_promised(card: Any) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 1.0, 2.0, 3.0]]).to("hpu")
    assert x.argmax(-1).tolist() == [2, 0]
    assert x.argmax(-1, keepdim=True).tolist() == [[2], [0]]
    card.hostile = False
    assert x.argmax(-1).tolist() == [1, 0]


def test_o12_more_indices_than_rows(card: Any) -> None:
    x = hpu(1, 2)
    refused(card, lambda: x.index_put_((ids(0, 1, 0),), hpu(1, 2, 3)), "scatter_nd_onnx")


@pytest.mark.parametrize(
    "write",
    [
        lambda x, index, values: x.index_copy_(0, index, values),
        lambda x, index, values: x.scatter_(0, index, values),
        lambda x, index, values: x.index_put_((index,), values),
    ],
)
def test_o13_of_several_writers_any_may_come_last(card: Any, write: Callable[..., Any]) -> None:
    x = hpu(0, 0, 0, 0)
    write(x, ids(1, 1, 2), hpu(5, 6, 7))
    assert x.tolist() == [0.0, 5.0, 7.0, 0.0]
    card.hostile = False
    write(x, ids(1, 1, 2), hpu(5, 6, 7))
    assert x.tolist() == [0.0, 6.0, 7.0, 0.0]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_copy_(0, ids(1, 2), x[:2]),
        lambda x: x.scatter_(0, ids(1, 2), x[:2]),
    ],
)
def test_o14_o38_a_source_in_the_memory_that_is_written(card: Any, write: Callable[..., Any]) -> None:
    x = hpu(1, 2, 3)
    with pytest.raises(RuntimeError, match="part of the tensor itself"):
        write(x)
    x.index_copy_(0, ids(1, 2), x.index_select(0, ids(0, 1)))  # gathered first, as copies of blocks are
    assert x.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "run",
    [
        lambda: F.unfold(torch.zeros(1, 1, 4, 4, device="hpu"), 2),
        lambda: torch.linalg.svd(torch.zeros(2, 2, device="hpu")),
    ],
)
def test_o18_operations_of_the_host(card: Any, run: Callable[[], Any]) -> None:
    run()
    assert card.counters.fallbacks >= 1


def test_o20_draws_from_bfloat16(card: Any) -> None:
    probs = hpu(0.5, 0.5, dtype=torch.bfloat16)
    refused(card, lambda: probs.multinomial(1), "samples badly")


def test_o22_a_generator_of_the_card(card: Any) -> None:
    """vllm-gaudi v0.26.0 makes one for each seeded request (hpu_model_runner.py); vllm-fork, 924, crashed with it."""
    first, second = (torch.Generator(device="hpu").manual_seed(3) for _ in range(2))
    assert (first.device, torch.Generator().device) == (torch.device("hpu", 0), torch.device("cpu"))
    assert isinstance(first, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    drawn = [torch.empty(4, device="hpu").exponential_(generator=generator).tolist() for generator in (first, second)]
    assert drawn[0] == drawn[1]
    assert torch.empty(4, device="hpu").exponential_(generator=first).tolist() != drawn[0]


def test_o24_a_quotient_is_not_exact(card: Any) -> None:
    x = torch.arange(1.0, 200.0)
    ours = x.to("hpu")
    assert (ours / ours).cpu().ne(1).any()
    torch.testing.assert_close((ours / ours).cpu(), torch.ones(199))
    card.hostile = False
    assert torch.equal((ours / ours).cpu(), torch.ones(199))


def test_o25_gelu_is_the_tanh_form(card: Any) -> None:
    x = torch.linspace(-3, 3, 50)
    assert torch.equal(F.gelu(x.to("hpu")).cpu(), F.gelu(x, approximate="tanh"))
    card.hostile = False
    assert torch.equal(F.gelu(x.to("hpu")).cpu(), F.gelu(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_o30_casts_to_and_from_fp8(card: Any, dtype: torch.dtype) -> None:
    fp8 = torch.zeros(2, dtype=torch.float8_e4m3fn, device="hpu")
    refused(card, lambda: torch.ops.hpu.cast_to_fp8_v2(hpu(1, dtype=dtype)), "it takes float32, bfloat16 and FP8")
    refused(card, lambda: torch.ops.hpu.cast_from_fp8(fp8, None, dtype), "it gives float32 and bfloat16")


def test_o33_sums_come_in_no_fixed_order(card: Any) -> None:
    values = hpu(1e8, 1, -1e8, 0.25)
    found = []
    for card.hostile in (True, False):
        x = hpu(0)
        x.scatter_add_(0, ids(0, 0, 0, 0), values)
        found.append(x.item())
    assert found[0] != found[1]
    counts = hpu(0, 0)
    card.hostile = True
    assert counts.scatter_add_(0, ids(0, 1, 0, 0), hpu(1, 1, 1, 1)).tolist() == [3.0, 1.0]


def test_o38_gathers_of_int64(card: Any) -> None:
    refused(card, lambda: ids(1, 2).gather(0, ids(1)), "gather of int64")
    assert hpu(1, 2, dtype=torch.int32).gather(0, ids(1)).tolist() == [2]


# --- fused kernels ---


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ("a04", {"mask": True, "causal": True}, "not both"),
        ("a04", {"lengths": True}, "is_causal only"),
        ("a05", {"mode": "slow"}, "knows no softmax"),
        ("a05", {"side": "middle"}, "knows no softmax"),
        ("a09", {"queries": 65537}, "65537 queries"),
        ("a12", {"queries": 40000, "mask": True}, "a mask of"),
    ],
)
def test_a04_a05_a09_a12_what_fused_attention_takes(card: Any, row: str, changes: dict[str, Any], words: str) -> None:
    card.compile_only = True  # so that the host allocates nothing
    queries = changes.get("queries", 2)
    q = torch.zeros(1, 1, queries, 1, dtype=torch.bfloat16, device="hpu")
    k = torch.zeros(1, 1, 65536 if changes.get("queries") == 40000 else 2, 1, dtype=torch.bfloat16, device="hpu")
    mask = torch.zeros(1, 1, queries, k.shape[2], dtype=torch.bfloat16, device="hpu") if changes.get("mask") else None
    lengths = ids(1) if changes.get("lengths") else None
    arguments = (mask, 0.0, 1.0, changes.get("causal", False), changes.get("mode", "fast"), lengths)
    refused(card, lambda: torch.ops.hpu.sdpa_fwd(q, k, k, *arguments, changes.get("side", "right"), [-1, -1]), words)


def two_rows(attention: Any, spec: AttentionLayerSpec) -> torch.Tensor:
    """Of four tokens each, after none and after three, with random numbers: each query sees other keys."""
    some = torch.Generator().manual_seed(0)
    query, *kv = (torch.randn(count, 1, 8, generator=some).to("hpu", torch.bfloat16) for count in (8, 48, 48))
    starts, table = (torch.tensor(values, dtype=torch.int32).to("hpu") for values in ([0, 3], [[1], [2]]))
    call = AttentionCall(num_rows=2, num_queries=4, starts_B=starts, block_table_BW=table)
    found: torch.Tensor = attention.attend(query, KVPair(*kv, 16), call, spec)
    return found


def test_a30_a_mask_of_2_gib_is_passed_in_parts(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from card_emulator.gaudi import fused
    from vllm_gaudi_spec.devices.hpu import backend as hpu_backend

    assert hpu_backend.LARGEST_MASK == fused.MASK_OVERFLOW == 2**31
    spec = one_head(torch.bfloat16, "llama")
    expected = two_rows(hpu_backend.make_backend().attention, spec)
    # The four queries of a row have masks of 32 bytes each.
    monkeypatch.setattr(fused, "MASK_OVERFLOW", 4 * 32)
    assert two_rows(hpu_backend.make_backend().attention, spec).isnan().all()
    for largest, sizes in ((4 * 32 + 1, [4]), (4 * 32, [2, 2]), (3 * 32, [2, 2]), (2 * 32, [1, 1, 1, 1])):
        monkeypatch.setattr(hpu_backend, "LARGEST_MASK", largest)
        monkeypatch.setattr(fused, "MASK_OVERFLOW", largest)
        attention: Any = hpu_backend.make_backend().attention
        kernel, called = attention._fused_sdpa, []

        def attend(query: torch.Tensor, *args: Any, kernel: Any = kernel, called: list[int] = called) -> torch.Tensor:
            called.append(query.shape[2])
            found: torch.Tensor = kernel.apply(query, *args)
            return found

        attention._fused_sdpa = SimpleNamespace(apply=attend)
        assert torch.equal(two_rows(attention, spec).cpu(), expected.cpu())
        assert called == sizes
    card.hostile = False
    monkeypatch.setattr(hpu_backend, "LARGEST_MASK", 2**31)
    assert not two_rows(hpu_backend.make_backend().attention, spec).isnan().any(), "a kind card has no such limit"


@pytest.mark.parametrize(("model_type", "mode"), [("llama", "fast"), ("qwen2", "fp32")])
def test_a11_the_fast_softmax_is_too_coarse_for_some_models(card: Any, model_type: str, mode: str) -> None:
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    backend, modes = make_backend(), []
    attention: Any = backend.attention
    kernel = attention._fused_sdpa

    class Seen:
        @staticmethod
        def apply(*args: Any) -> torch.Tensor:
            modes.append(args[7])
            found: torch.Tensor = kernel.apply(*args)
            return found

    attention._fused_sdpa = Seen
    one_step(attention, one_head(torch.bfloat16, model_type))
    assert modes == [mode]


@pytest.mark.parametrize("sinks", [True, False])
def test_a13_a_marker_follows_attention_with_sinks(card: Any, sinks: bool) -> None:
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    attention: Any = make_backend().attention
    spec = one_head(torch.bfloat16, "gpt_oss")
    if sinks:
        spec = replace(spec, sinks_H=torch.zeros(1, dtype=torch.bfloat16, device="hpu"))
    issued: list[str] = []
    kernel, bridge = attention._fused_sdpa, attention._bridge

    def attend(*args: Any) -> torch.Tensor:
        issued.append(f"attention of {len(args)} arguments")
        found: torch.Tensor = kernel.apply(*args)
        return found

    attention._fused_sdpa = SimpleNamespace(apply=attend)
    attention._bridge = SimpleNamespace(regions=bridge.regions, mark_step=lambda: issued.append("marker"))
    one_step(attention, spec)
    assert issued == (["attention of 15 arguments", "marker"] if sinks else ["attention of 11 arguments"])


def test_a_release_whose_attention_knows_no_sinks(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch serves such layers."""
    from habana_frameworks.torch.hpex import kernels

    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    class Older:
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, *, seq_padding_type: str) -> None: ...

        @staticmethod
        def apply(*args: Any) -> torch.Tensor:
            raise AssertionError("called with sinks")

    monkeypatch.setattr(kernels, "FusedSDPA", Older)
    sinks = torch.full((1,), 100.0, dtype=torch.bfloat16, device="hpu")
    out = one_step(make_backend().attention, replace(one_head(torch.bfloat16, "gpt_oss"), sinks_H=sinks))
    assert not out.cpu().any(), "a sink far above all scores leaves nothing"


@pytest.mark.parametrize("release", ["passes them on", "drops them", "has no such flag"])
def test_a32_sinks_that_the_bridge_drops(card: Any, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the flag is on is asked of the bridge, which has read the environment."""
    from habana_frameworks.torch.hpex import kernels
    from habana_frameworks.torch.internal import bridge_config

    from card_emulator.card import DEVICE
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    called: list[int] = []
    kernel = kernels.FusedSDPA

    class Seen(kernel):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, *, sink: Any) -> None: ...

        @staticmethod
        def apply(*args: Any) -> torch.Tensor:
            called.append(len(args))
            found: torch.Tensor = kernel.apply(*args)
            return found

    monkeypatch.setattr(kernels, "FusedSDPA", Seen)
    if release != "passes them on":
        monkeypatch.setitem(DEVICE.bridge_flags, "PT_HPU_ENABLE_FUSED_SDPA_SINK", False)
    if release == "has no such flag":
        monkeypatch.delattr(bridge_config, "get_pt_hpu_enable_fused_sdpa_sink")
    sinks = torch.full((1,), 100.0, dtype=torch.bfloat16, device="hpu")
    out = one_step(make_backend().attention, replace(one_head(torch.bfloat16, "gpt_oss"), sinks_H=sinks))
    assert called == ([15] if release == "passes them on" else [])
    assert not out.cpu().any(), "a sink far above all scores leaves nothing"


def one_step(attention: Any, spec: AttentionLayerSpec) -> torch.Tensor:
    """Of a prompt of four tokens, over a cache of ones."""
    kv = KVPair(*(torch.ones(32, 1, 8, dtype=torch.bfloat16, device="hpu") for _ in range(2)), 16)
    starts, table = torch.zeros(1, dtype=torch.int32, device="hpu"), torch.ones(1, 1, dtype=torch.int32, device="hpu")
    call = AttentionCall(num_rows=1, num_queries=4, starts_B=starts, block_table_BW=table)
    query = torch.zeros(4, 1, 8, dtype=torch.bfloat16, device="hpu")
    found: torch.Tensor = attention.attend(query, kv, call, spec)
    return found


def test_a11_its_exponentials_are_bfloat16(card: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    exact = F.scaled_dot_product_attention(q, k, v, scale=1.0)

    def error(mode: str) -> float:
        ours = (part.to("hpu") for part in (q, k, v))
        out = torch.ops.hpu.sdpa_fwd(*ours, None, 0.0, 1.0, False, mode, None, "left", [-1, -1])
        return float((out.cpu() - exact).abs().max())

    assert error("fast") > 1e-4 > error("fp32")
    card.hostile = False
    assert error("fast") < 1e-5


def test_a05_padding_is_left_by_default(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q, v = torch.zeros(1, 1, 4, 1, device="hpu"), torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 4, 1).to("hpu")
    means = [
        FusedSDPA.apply(q, q, v, None, 0.0, True, 1.0, "fast", True, ids(2), *side)[0, 0, -1, 0].item()
        for side in ((), ("right",))
    ]
    assert means == [6.0, 1.5]


@pytest.mark.parametrize(("generation", "read"), [("gaudi2", [240.0, None]), ("gaudi3", [240.0, 256.0])])
def test_q02_q03_bytes_past_240_are_no_numbers(
    card: Any, generation: str, read: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint that was made for other cards, on a Gaudi 2."""
    from card_emulator.gaudi.models import MODELS

    monkeypatch.setattr(card, "model", MODELS[generation])
    weight = torch.tensor([240.0, 256.0]).to(torch.float8_e4m3fn)
    found = weight.to("hpu").float().tolist()
    assert [None if number != number else number for number in found] == read
    card.hostile = False
    assert weight.to("hpu").float().tolist() == [240.0, 256.0]


def test_q04_a22_scales_are_float32(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

    fp8, scale = torch.zeros(2, 2, dtype=torch.float8_e4m3fn, device="hpu"), hpu(1, dtype=torch.bfloat16)
    attended = torch.zeros(1, 1, 2, 8, dtype=torch.float8_e4m3fn, device="hpu")
    torch.ops.hpu.cast_to_fp8_v2(hpu(1, 2), scale)  # vllm-gaudi v0.26.0, extension/ops.py, dynamic_quant
    for run in (
        lambda: torch.ops.hpu.cast_to_fp8_v2(hpu(1, 2), scale.half()),
        lambda: torch.ops.hpu.cast_from_fp8(fp8, scale, torch.float32),
        lambda: fp8_fused_sdpa(attended, attended, attended, d_scale_q=scale),
        lambda: torch.ops.hpu.fp8_gemm_v2(fp8, False, fp8, False, None, torch.bfloat16, scale, scale),
    ):
        refused(card, run, "mismatch of types")
