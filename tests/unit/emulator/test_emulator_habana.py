"""The stand-in for habana_frameworks: fused operations against dense ones, and the small functions around them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_gaudi_spec.devices.hpu.compiled import make_region_compiler
from vllm_gaudi_spec.devices.hpu.fp8 import GaudiArithmetic
from vllm_gaudi_spec.emulator import kernels
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic, to_e4m3
from vllm_gaudi_spec.records import WarmUpWork


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, hidden: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    return ((q @ k.transpose(-1, -2)) * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def test_the_package_is_found(card: Any) -> None:
    """By those who look before they import, as Ray does."""
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpu"):
        assert importlib.util.find_spec(name) is not None
    import habana_frameworks.torch.core

    assert habana_frameworks.torch.core.__spec__.name == "habana_frameworks.torch.core"


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("form", ["causal", "boolean", "additive", "padded"])
def test_attention(card: Any, kv_heads: int, form: str) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 8)
    hidden = torch.ones(5, 5).triu(1).bool().expand(2, 1, 5, 5)
    args: tuple[Any, ...] = (None, 0.0, True, 0.3)
    if form == "boolean":
        args = (~hidden.to("hpu"), 0.0, False, 0.3)
    elif form == "additive":
        args = (torch.zeros(2, 1, 5, 5).masked_fill(hidden, -torch.inf).to("hpu"), 0.0, False, 0.3)
    elif form == "padded":
        lengths = torch.tensor([5, 3], dtype=torch.int32)
        hidden = hidden | (torch.arange(5) >= lengths.view(2, 1, 1, 1))
        args = (*args, "fp32", True, lengths.to("hpu"), "right")
    ours = [part.to("hpu") for part in (q, k, v)]
    before = card.counters.ops
    out = FusedSDPA.apply(*ours, *args)
    assert card.counters.ops == before + 1
    assert card.counters.flops > 0
    torch.testing.assert_close(out.cpu(), dense(q, k, v, 0.3, hidden))


def test_a04_attention_refuses_what_the_kernel_does(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q = torch.zeros(1, 1, 2, 8, device="hpu")
    with pytest.raises(ValueError, match="not both"):
        FusedSDPA.apply(q, q, q, q, 0.0, True)
    with pytest.raises(ValueError, match="is_causal only"):
        FusedSDPA.apply(q, q, q, None, 0.0, False, None, "None", None, q)


def test_norm(card: Any) -> None:
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    x, gamma = torch.randn(2, 3, 8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)
    out = FusedRMSNorm.apply(x.to("hpu"), gamma.to("hpu"), 1e-5)
    torch.testing.assert_close(out.cpu(), F.rms_norm(x.float(), (8,), gamma.float(), 1e-5).bfloat16())


@pytest.mark.parametrize("mode", ["BLOCKWISE", "PAIRWISE"])
def test_rotary(card: Any, mode: str) -> None:
    from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingMode, apply_rotary_pos_emb

    x = torch.randn(3, 2, 8)
    angle = torch.randn(3, 1, 4)
    turn = torch.polar(torch.ones_like(angle), angle)
    if mode == "BLOCKWISE":
        expected = torch.view_as_real(torch.complex(*x.chunk(2, -1)) * turn).movedim(-1, -2).flatten(-2)
        full = torch.cat((angle, angle), -1)
    else:
        expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn).flatten(-2)
        full = angle.repeat_interleave(2, -1)
    cos, sin = full.cos().to("hpu"), full.sin().to("hpu")
    out = apply_rotary_pos_emb(x.to("hpu"), cos, sin, None, 0, RotaryPosEmbeddingMode[mode])
    torch.testing.assert_close(out.cpu(), expected)


def test_block_softmax_adds_up_to_a_softmax(card: Any) -> None:
    """Three blocks of two rows, one unused block: the two ops together are a softmax over a row's blocks."""
    scores = torch.randn(4, 2, 1, 1, 8).bfloat16()
    bias = torch.zeros(4, 1, 1, 1, 8)
    groups = torch.tensor([0, 1, 0, -1], dtype=torch.int32)
    weights, top, sums = torch.ops.hpu.block_softmax(scores.to("hpu"), bias.to("hpu"), groups.to("hpu"))
    assert top.shape == (4, 128)
    assert weights[3].count_nonzero().item() == 0
    factor = torch.ops.hpu.block_softmax_adjustment(top, sums, groups.to("hpu"), 2, [4, 2, 1, 1, 1])
    ours = (weights * factor).cpu()
    row = torch.cat((scores[0], scores[2]), -1).softmax(-1)
    torch.testing.assert_close(torch.cat((ours[0], ours[2]), -1), row, atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(ours[1], scores[1].softmax(-1), atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize(("queries", "dtype"), [(4, torch.bfloat16), (1, torch.float32)])
def test_a01_block_softmax_takes_what_was_run_on_cards(card: Any, queries: int, dtype: torch.dtype) -> None:
    """One query a row, bfloat16: vllm-gaudi has it off on every card, and ran nothing else."""
    scores, bias = torch.zeros(4, 2, 1, queries, 8, dtype=dtype), torch.zeros(4, 1, 1, queries, 8)
    arguments = [each.to("hpu") for each in (scores, bias, torch.zeros(4, dtype=torch.int32))]
    with pytest.raises(RuntimeError, match="nobody has run"):
        torch.ops.hpu.block_softmax(*arguments)
    card.hostile = False
    torch.ops.hpu.block_softmax(*arguments)


def test_q05_fp8_round_trip_and_product(card: Any) -> None:
    x, w = torch.randn(3, 16), torch.randn(5, 16)
    scale = x.abs().max() / 240
    packed, amax = torch.ops.hpu.cast_to_fp8_v2(x.to("hpu"), (1 / scale).to("hpu"), False, True, torch.float8_e4m3fn)
    assert packed.dtype is torch.float8_e4m3fn
    assert amax.item() == x.abs().max().item()
    back = torch.ops.hpu.cast_from_fp8(packed, scale.to("hpu"), torch.float32)
    torch.testing.assert_close(back.cpu(), x, rtol=0.07, atol=0.02)
    weight = torch.ops.hpu.cast_to_fp8_v2(w.to("hpu"), None, False, False, torch.float8_e4m3fn)[0]
    out = torch.ops.hpu.fp8_gemm_v2(packed, False, weight, True, None, torch.bfloat16, scale.to("hpu"), None, None)
    expected = back.cpu() @ weight.cpu().float().t()
    torch.testing.assert_close(out.cpu().float(), expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_has_the_bits_of_the_cpus_simulation(card: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(5, 96) * 40).to(dtype), to_e4m3(torch.randn(96, 30) * 50, 240.0)
    x_scale, y_scales = torch.tensor(0.013), torch.rand(30) + 0.1
    host, ours = HostArithmetic(240.0), GaudiArithmetic(240.0)
    values = ours.cast(x.to("hpu"), (1 / x_scale).to("hpu"))
    expected = host.cast(x, 1 / x_scale)
    assert torch.equal(values.cpu().double(), expected)
    back = ours.uncast(values, x_scale.to("hpu"), dtype)
    assert torch.equal(back.cpu(), host.uncast(expected, x_scale, dtype))
    product = ours.multiply(values, ours.keep(weight.to("hpu")), x_scale.to("hpu"), y_scales.to("hpu"), dtype)
    assert torch.equal(product.cpu(), host.multiply(expected, host.keep(weight), x_scale, y_scales, dtype))


@pytest.mark.parametrize("inverse", [torch.tensor(2.0), torch.tensor([[2.0], [3.0]])], ids=["per tensor", "per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q01_the_range_is_not_left_to_the_cards_cast(
    card: Any, dtype: torch.dtype, inverse: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a card's does past it is published nowhere: here no number comes out, as of torch's own."""

    def to_e4m3_or_nan(x: torch.Tensor, largest: float) -> torch.Tensor:
        # What is rounded to the largest number is that.
        is_past = x.abs() > largest * (1 + 2.0**-5)
        return x.float().masked_fill(is_past, torch.nan).clamp(-largest, largest).to(torch.float8_e4m3fn)

    monkeypatch.setattr(kernels, "to_e4m3", to_e4m3_or_nan)
    x = torch.tensor([[121.0, -1e30], [3.0, -torch.inf]], dtype=dtype)
    assert torch.ops.hpu.cast_to_fp8_v2(x.to("hpu"), None)[0].cpu().float().isnan().any()
    found = GaudiArithmetic(240.0).cast(x.to("hpu"), inverse.to("hpu")).cpu().double()
    assert torch.equal(found, HostArithmetic(240.0).cast(x, inverse))


def test_streams_events_and_memory(card: Any) -> None:
    with torch.hpu.stream(torch.hpu.Stream()) as _:
        start, end = torch.hpu.Event(enable_timing=True), torch.hpu.Event(enable_timing=True)
        start.record()
        end.record(torch.hpu.current_stream())
        end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert torch.hpu.current_stream() is torch.hpu.default_stream()
    stats = torch.hpu.memory_stats()
    assert stats["Limit"] == torch.hpu.mem_get_info()[1]
    torch.hpu.reset_peak_memory_stats()
    kept = torch.zeros(1024, device="hpu")
    assert torch.hpu.max_memory_allocated() - torch.hpu.memory_allocated() == 0
    assert kept.numel()


def test_h13_metrics_and_names(card: Any) -> None:
    import habana_frameworks.torch as htorch
    import habana_frameworks.torch.core as htcore
    import habana_frameworks.torch.utils.experimental as htexp
    from habana_frameworks.torch.hpu.metrics import metric_global, metric_localcontext

    assert htorch.core is htcore
    assert htorch.utils.internal.is_lazy()
    assert htexp._get_device_type() == htexp.synDeviceType.synDeviceGaudi2
    assert (torch.hpu.is_available(), torch.hpu.device_count()) == (True, 1)
    x = torch.ones(2).to("hpu")
    with metric_localcontext("graph_compilation") as metric:
        x + 1
        htcore.mark_step()
    assert metric.stats()[0] == ("TotalNumber", 1)
    x.mode()
    assert metric_global("cpu_fallback").stats()[1] == ("FallbackOps", ["aten.mode.default"])


def test_its_torch_is_torch(card: Any) -> None:
    from habana_frameworks.torch import torch as theirs

    assert theirs is torch


def test_p02_estimates(card: Any) -> None:
    from vllm_gaudi_spec.devices.hpu.compile_time import Recipes
    from vllm_gaudi_spec.emulator import cost

    x = torch.zeros(64, 64).to("hpu")
    card.next_step()
    (x @ x).cpu()
    step = card.next_step()
    assert 0 < cost.step_seconds(step, "gaudi3") < cost.step_seconds(step, "gaudi2") < 1e-3
    assert Recipes(prompts=3 * 24, others=3 * 48).seconds() == pytest.approx(49)
    assert Recipes(prompts=3 * 24, others=3).seconds() == pytest.approx(32)
    assert Recipes(prompts=3 * 24, others=3 * 48).seconds(cached=True) == pytest.approx(49 * 23 / 66)
    with pytest.raises(ValueError, match="the card is one of"):
        cost.step_seconds(step, "gaudi1")


@pytest.mark.parametrize(
    ("layers", "mode", "words"),
    [
        ("1", "1", "about 5 different recipes, which may take 0.0 min"),
        ("0", "1", "3 graphs"),
        ("2", "1", "3 graphs"),
        ("1", "0", "3 graphs"),
    ],
)
def test_recipes_are_estimated_where_they_were_published(
    layers: str, mode: str, words: str, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a marker after each layer."""
    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    monkeypatch.setenv("VLLM_CONFIG_HIDDEN_LAYERS", layers)
    graphs = make_backend().graphs
    monkeypatch.setattr(
        graphs, "_bridge", graphs._bridge._replace(regions=None if mode == "1" else make_region_compiler())
    )
    assert graphs.describe_warm_up(WarmUpWork((), 2, 1, 1, 1)).startswith(words)


def test_steps_in_flight_are_not_compiled_only(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode is the process's: before it begins what was issued has been computed, and in it all of warm-up's."""
    from habana_frameworks.torch.internal import bridge_config

    from vllm_gaudi_spec.devices.hpu.backend import make_backend

    seen: list[str] = []
    original, env_setting = torch.hpu.synchronize, bridge_config.env_setting

    def synchronize() -> None:
        seen.append("synchronize")
        original()

    @contextmanager
    def setting(name: str, value: Any) -> Iterator[None]:
        with env_setting(name, value):
            seen.append("on")
            yield
            seen.append("off")

    monkeypatch.setattr(torch.hpu, "synchronize", synchronize)
    monkeypatch.setattr(bridge_config, "env_setting", setting)
    with make_backend().graphs.warming_up_later():
        seen.append("run")
    assert seen == ["synchronize", "on", "run", "synchronize", "off"]


def test_s05_installation() -> None:
    """In a process of its own: nothing happens on import, and one process has one device."""
    code = (
        "import sys\n"
        "from vllm_gaudi_spec import emulator\n"
        "assert 'torch' not in sys.modules\n"
        "emulator.install('gaudi3', lazy=False)\n"
        "emulator.install('gaudi3', lazy=False)\n"
        "import torch, habana_frameworks.torch as htorch\n"
        "assert torch.hpu.get_device_name() == 'GAUDI3' and not htorch.utils.internal.is_lazy()\n"
        "assert not hasattr(htorch.hpu, 'wrap_in_hpu_graph')\n"
        "assert torch.tensor([1 << 40]).to('hpu').item() == 1 << 40\n"
        "try:\n    emulator.install('gaudi2')\nexcept RuntimeError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs a process of its own" in result.stdout


def test_an_engine_process_may_ask_for_kernels_first() -> None:
    """As one of several data-parallel engines does: it completes its configuration before it has a worker."""
    code = "from vllm.platforms import current_platform as it; print(it.get_default_ir_op_priority(None).rms_norm)"
    environment = os.environ | {"VGS_DEVICE": "hpu-emulated", "PT_HPU_LAZY_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.stdout.strip().endswith("'native']"), finished.stderr[-2000:]
