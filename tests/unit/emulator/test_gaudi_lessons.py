"""What others learned on real Gaudis, and the answer to it here, on the emulated one.

docs/contributing/quirks.md has the rows by number; card_emulator/tests/gaudi/test_lessons.py tests the card itself.
"""

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
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from card_emulator.card import DEVICE
from card_emulator.gaudi import fused, habana, ownership
from card_emulator.gaudi.models import MODELS
from card_emulator.testing import graph
from tests.support.attention_layers import call
from tests.support.attention_layers import layer as attention_layer
from vllm_gaudi_spec import environment
from vllm_gaudi_spec.attention.flat import choose_group
from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec, FlatBlocks
from vllm_gaudi_spec.devices.common.kv_pair import KVPair
from vllm_gaudi_spec.devices.hpu import backend as hpu_backend
from vllm_gaudi_spec.devices.hpu.backend import make_backend, mark_layers
from vllm_gaudi_spec.quantization.layers import kv_range
from vllm_gaudi_spec.recurrent.scans import scan

# --- start-up ---


@pytest.mark.parametrize("generation", ["gaudi2", "gaudi3"])
def test_s13_the_generation_is_not_read_from_a_name(
    card: Any, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "model", MODELS[generation])
    card.console = True
    assert torch.hpu.get_device_name() != generation.upper()
    assert torch.hpu.get_device_name().endswith(generation.upper())
    assert make_backend().weights.fp8_range == generation


def test_q01_a_card_that_is_neither_has_the_narrower_range(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import habana_frameworks.torch.utils.experimental as htexp

    monkeypatch.setattr(htexp, "_get_device_type", lambda: None)
    assert kv_range(make_backend().weights.fp8_range) == "gaudi2"


def test_s27_a_release_without_the_attention_kernel_starts(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("habana_frameworks.torch.hpex.kernels")
    monkeypatch.delattr(kernels, "FusedSDPA")
    assert make_backend().attention is not None


def test_s28_a_card_belongs_to_one_process(card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For locks of files, another opening of the same file is another holder."""

    def use(modules: str) -> None:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", modules)
        monkeypatch.setattr(card, "pid", 0)
        monkeypatch.setattr(card, "acquire", partial(ownership.acquire, tmp_path, environment.emulated_modules()))
        torch.zeros(1, device="hpu")

    monkeypatch.setattr(ownership, "_locked", [])
    use("3")
    with pytest.raises(RuntimeError, match=r"synStatus=20 .Device already acquired"):
        use("3")
    card.hostile = False
    use("3")
    card.hostile = True
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


@pytest.mark.parametrize("num_decays", [1, 4])
def test_l27_recurrences_have_five_dimensions(card: Any, num_decays: int) -> None:
    keys = torch.ones(1, 8, 1, 4, device="hpu")
    decay, state = torch.zeros(1, 8, 1, num_decays, device="hpu"), torch.zeros(1, 1, 4, 4, device="hpu")
    out, _ = scan(keys, keys / 2, keys, decay, state, torch.ones(1, 8, 1, device="hpu"))
    torch.testing.assert_close(out.cpu(), torch.full((1, 8, 1, 4), 2.0))


# --- operators ---


def test_o04_attention_of_one_head_and_one_query(card: Any) -> None:
    kv = KVPair(*(torch.ones(32, 1, 8, device="hpu") for _ in range(2)), 16)
    zero = torch.zeros(1, dtype=torch.int32, device="hpu")
    listed = call([0], [[0]], device="hpu", flat=FlatBlocks(zero + 1, zero, zero))
    query = torch.ones(1, 1, 8, device="hpu")
    out = make_backend().attention.attend(query, kv, listed, one_head(torch.float32, "llama"))
    assert out.flatten().tolist() == [1.0] * 8


@torch.inference_mode()
def test_decode_of_long_rows_runs_few_operators(card: Any) -> None:
    """Scores in bfloat16 are rounded by the matrix products alone, and a group of blocks costs no operator."""
    num_blocks, rows, queries = 64, 2, 4
    kv = KVPair(*(torch.ones((num_blocks + 1) * 16, 1, 8, dtype=torch.bfloat16, device="hpu") for _ in range(2)), 16)
    query_THD = torch.ones(rows * queries, 1, 8, dtype=torch.bfloat16, device="hpu")
    operators = []
    for group in (1, choose_group(num_blocks, rows)):
        num_entries = num_blocks // group
        rows_N = torch.arange(rows, dtype=torch.int32).repeat_interleave(num_entries // rows)
        index_N = torch.arange(num_entries // rows, dtype=torch.int32).repeat(rows) * group
        blocks = torch.arange(1, num_blocks + 1, dtype=torch.int32), rows_N, index_N
        flat = FlatBlocks(*(one.to("hpu") for one in blocks))
        listed = call([508, 400], [[0] * (num_blocks // rows)] * rows, queries, device="hpu", flat=flat)
        before = card.counters.total.ops
        out = make_backend().attention.attend(query_THD, kv, listed, one_head(torch.bfloat16, "llama"))
        operators.append(card.counters.total.ops - before)
        torch.testing.assert_close(out.cpu(), torch.ones_like(query_THD).cpu(), atol=1e-2, rtol=0.0)
    assert group == 2
    assert operators == [42, 42]


def one_head(dtype: torch.dtype, model_type: str) -> AttentionLayerSpec:
    sizes = dict(num_heads=1, num_kv_heads=1, head_size=8, scale=1.0, block_size=16)
    return attention_layer(**sizes, dtype=dtype, model_type=model_type)


# --- fused kernels ---


def two_rows(attention: Any, spec: AttentionLayerSpec) -> torch.Tensor:
    """Of four tokens each, after none and after three, with random numbers: each query sees other keys."""
    some = torch.Generator().manual_seed(0)
    query, *kv = (torch.randn(count, 1, 8, generator=some).to("hpu", torch.bfloat16) for count in (8, 48, 48))
    return attention.attend(query, KVPair(*kv, 16), call([0, 3], [[1], [2]], 4, device="hpu"), spec)


def observe_kernel(attention: Any, observe: Callable[..., None]) -> None:
    """Pass the arguments of each call of the fused kernel to `observe` first."""
    kernel = attention._fused_sdpa

    def apply(*args: Any) -> torch.Tensor:
        observe(*args)
        return kernel.apply(*args)

    attention._fused_sdpa = SimpleNamespace(apply=apply)


def test_a30_a_mask_of_2_gib_is_passed_in_parts(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hpu_backend.LARGEST_MASK == fused.MASK_OVERFLOW == 2**31
    spec = one_head(torch.bfloat16, "llama")
    expected = two_rows(hpu_backend.make_backend().attention, spec)
    # The four queries of a row have masks of 32 bytes each.
    monkeypatch.setattr(fused, "MASK_OVERFLOW", 4 * 32)
    assert two_rows(hpu_backend.make_backend().attention, spec).isnan().all()
    for largest, sizes in ((4 * 32 + 1, [4]), (4 * 32, [2, 2]), (3 * 32, [2, 2]), (2 * 32, [1, 1, 1, 1])):
        monkeypatch.setattr(hpu_backend, "LARGEST_MASK", largest)
        monkeypatch.setattr(fused, "MASK_OVERFLOW", largest)
        attention, called = hpu_backend.make_backend().attention, []
        observe_kernel(attention, lambda query, *_, called=called: called.append(query.shape[2]))
        assert torch.equal(two_rows(attention, spec).cpu(), expected.cpu())
        assert called == sizes
    card.hostile = False
    monkeypatch.setattr(hpu_backend, "LARGEST_MASK", 2**31)
    assert not two_rows(hpu_backend.make_backend().attention, spec).isnan().any(), "a kind card has no such limit"


@pytest.mark.parametrize(("model_type", "mode"), [("llama", "fast"), ("qwen2", "fp32")])
def test_a11_the_fast_softmax_is_too_coarse_for_some_models(card: Any, model_type: str, mode: str) -> None:
    attention, modes = make_backend().attention, []
    observe_kernel(attention, lambda *args: modes.append(args[7]))
    one_step(attention, one_head(torch.bfloat16, model_type))
    assert modes == [mode]


@pytest.mark.parametrize("sinks", [True, False])
def test_a13_a_marker_follows_attention_with_sinks(card: Any, sinks: bool) -> None:
    attention: Any = make_backend().attention
    spec = one_head(torch.bfloat16, "gpt_oss")
    if sinks:
        spec = replace(spec, sinks_H=torch.zeros(1, dtype=torch.bfloat16, device="hpu"))
    issued: list[str] = []
    observe_kernel(attention, lambda *args: issued.append(f"attention of {len(args)} arguments"))
    attention._bridge = SimpleNamespace(regions=attention._bridge.regions, mark_step=lambda: issued.append("marker"))
    one_step(attention, spec)
    assert issued == (["attention of 15 arguments", "marker"] if sinks else ["attention of 11 arguments"])


@pytest.mark.parametrize("release", ["passes them on", "drops them", "has no such flag", "knows no sinks"])
def test_a32_sinks_that_the_bridge_drops(card: Any, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch serves such layers. Whether the flag is on is asked of the bridge, which has read the environment."""
    from habana_frameworks.torch.hpex import kernels
    from habana_frameworks.torch.internal import bridge_config

    called: list[int] = []
    kernel = kernels.FusedSDPA

    class Seen(kernel):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, *, sink: Any) -> None: ...

        @staticmethod
        def apply(*args: Any) -> torch.Tensor:
            called.append(len(args))
            return kernel.apply(*args)

    monkeypatch.setattr(kernels, "FusedSDPA", Seen)
    if release == "knows no sinks":
        monkeypatch.setattr(Seen, "forward", staticmethod(lambda ctx, q, k, v, *, seq_padding_type: None))
    elif release != "passes them on":
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
    query = torch.zeros(4, 1, 8, dtype=torch.bfloat16, device="hpu")
    return attention.attend(query, kv, call([0], [[1]], 4, device="hpu"), spec)
