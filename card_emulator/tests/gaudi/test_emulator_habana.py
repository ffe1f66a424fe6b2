"""The stand-in for habana_frameworks: fused operations against dense ones, and the small functions around them."""

import subprocess
import sys
from typing import Any

import pytest
import torch


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
    with pytest.raises(RuntimeError, match="only one query per row"):
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
    for _ in range(2):
        x.mode()
    assert metric_global("cpu_fallback").stats()[1] == ("FallbackOps", {"aten.mode.default": 2})


def test_p02_estimates_of_a_step(card: Any) -> None:
    from card_emulator import cost

    x = torch.zeros(64, 64).to("hpu")
    card.next_step()
    (x @ x).cpu()
    step = card.next_step()
    assert 0 < cost.step_seconds(step, "gaudi3") < cost.step_seconds(step, "gaudi2") < 1e-3
    assert pytest.approx(49 - 32) == 3 * 47 * cost.RECIPE_SECONDS
    with pytest.raises(ValueError, match="the card must be one of"):
        cost.step_seconds(step, "gaudi1")


def test_s05_installation() -> None:
    """In a process of its own: nothing happens on import, and one process has one device."""
    code = (
        "import sys\n"
        "import card_emulator\n"
        "assert 'torch' not in sys.modules\n"
        "card_emulator.install('gaudi3', lazy=False)\n"
        "card_emulator.install('gaudi3', lazy=False)\n"
        "import torch, habana_frameworks.torch as htorch\n"
        "assert torch.hpu.get_device_name() == 'GAUDI3' and not htorch.utils.internal.is_lazy()\n"
        "assert not hasattr(htorch.hpu, 'wrap_in_hpu_graph')\n"
        "assert torch.tensor([1 << 40]).to('hpu').item() == 1 << 40\n"
        "try:\n    card_emulator.install('gaudi2')\nexcept RuntimeError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs its own process" in result.stdout
