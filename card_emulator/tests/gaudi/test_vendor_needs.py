"""What software that runs on cards does, and the emulated card did not take: one test each, with who does it.

Unless another is named that is vllm-gaudi v0.26.0; `make verify-vendor` runs it as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from card_emulator.card import DeviceRefusal
from card_emulator.kernels import to_e4m3
from card_emulator.testing import hpu


class _Weight(torch.nn.Parameter):
    """As vLLM's: more than data, and its class decides how it is loaded."""

    def __new__(cls, data: torch.Tensor, loader: str) -> _Weight:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, loader: str) -> None:
        self.loader = loader


def test_a_model_on_its_way_keeps_its_parameters(card: Any) -> None:
    """hpu_model_runner.py, load_model: `self.model.to("hpu")`, with vLLM's weights and tied ones, some there."""
    weight = _Weight(torch.ones(2), "rows")
    plain, there = torch.nn.Parameter(torch.zeros(2)), _Weight(hpu(3), "columns")
    model = torch.nn.ModuleDict({name: torch.nn.Module() for name in "ab"})
    for module in model.values():
        module.weight, module.plain, module.there = weight, plain, there
    with torch.inference_mode(False):
        model.to("hpu")
    for module in model.values():
        assert (module.weight, module.plain, module.there) == (weight, plain, there)
    assert {parameter.device.type for parameter in model.parameters()} == {"hpu"}
    assert (type(weight).__name__, weight.loader, there.loader) == ("_Weight", "rows", "columns")
    assert isinstance(weight, _Weight)
    assert isinstance(torch.nn.Parameter(weight.data, requires_grad=False), torch.nn.Parameter)  # ops/hpu_gptq.py
    assert isinstance(plain, torch.nn.Parameter)
    assert (weight + 1).tolist() == [2.0, 2.0]
    model.to("cpu")
    assert (type(weight), weight.loader, weight.tolist()) == (_Weight, "rows", [1.0, 1.0])
    assert model["b"].plain is plain
    assert plain.numpy().shape == (2,)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:1],
        lambda x: x.view(-1)[:2],
        lambda x: x.chunk(2)[0],
        lambda x: x.T[:, :1].T,
        lambda x: x.detach()[0].expand(1, 2),
    ],
)
def test_views_in_inference_mode_of_tensors_from_outside(card: Any, view: Callable[[torch.Tensor], Any]) -> None:
    """hpu_input_batch.py: slices of what the worker made when it started."""
    with torch.inference_mode(False):
        outside = torch.zeros(2, 2, device="hpu")
    view(outside).add_(1)
    assert outside.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def _experts(num: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.randn(12, 8) for _ in range(num)], [torch.randn(8, 6) for _ in range(num)]


def _by_tokens(x: torch.Tensor, table: Any, router: Any, w12: Any, w3: Any, first: int) -> torch.Tensor:
    """One after the other, only those of this rank."""
    out = torch.zeros_like(x)
    for token, experts in enumerate(table.tolist()):
        for expert, share in zip(experts, router[token], strict=True):
            if first <= expert < first + len(w12):
                gate, up = (w12[expert - first] @ x[token]).chunk(2)
                out[token] += share * (w3[expert - first] @ (torch.nn.functional.silu(gate) * up))
    return out


def test_a_mixture_of_experts(card: Any) -> None:
    """extension/ops.py, VllmMixtureOfExpertsOp: `w12` and `w3` as linear layers have them, experts 2 to 4 here of 5."""
    torch.manual_seed(0)
    (w12, w3), x = _experts(3), torch.randn(4, 8)
    w3 = [torch.randn(8, 6) for _ in w12]
    table, router = torch.tensor([[0, 2], [3, 4], [4, 2], [1, 0]]), torch.rand(4, 2)
    arguments: dict[str, Any] = {
        "hidden_states": x.to("hpu"),
        "expert_routing_table": table.to("hpu"),
        "router_weights": router.to("hpu"),
        "w3": [weight.to("hpu") for weight in w3],
        "activation": "silu",
        "experts_min": 2,
        "experts_max": 4,
    }
    ours = [weight.to("hpu") for weight in w12]
    out = torch.ops.hpu.mixture_of_experts(**arguments, w12=ours, permuted_weights=True, chunk_size=64, total_experts=5)
    expected = _by_tokens(x, table, router, w12, w3, 2)
    torch.testing.assert_close(out.cpu(), expected)
    assert card.counters.flops == 2 * table.numel() * (w12[0].numel() + w3[0].numel())
    turned = {
        name: [w.chunk(2)[part].t().contiguous().to("hpu") for w in w12] for part, name in enumerate(("w1", "w2"))
    }
    arguments["w3"] = [weight.t().contiguous().to("hpu") for weight in w3]
    apart = torch.ops.hpu.mixture_of_experts(**arguments, **turned, permuted_weights=False)
    torch.testing.assert_close(apart.cpu(), expected)


@pytest.mark.parametrize(("ids", "weights"), [(torch.int32, torch.float32), (torch.int64, torch.bfloat16)])
def test_m01_dtypes_that_a_mixture_does_not_take(ids: torch.dtype, weights: torch.dtype, card: Any) -> None:
    (w12, w3), (table, router) = _experts(2), (torch.tensor([[0, 1]]), torch.rand(1, 2))
    with pytest.raises(DeviceRefusal, match="it requires int64 ids"):
        torch.ops.hpu.mixture_of_experts(
            hidden_states=torch.randn(1, 8).to("hpu"),
            expert_routing_table=table.to(ids).to("hpu"),
            router_weights=router.to(weights).to("hpu"),
            w12=[weight.to("hpu") for weight in w12],
            w3=[weight.to("hpu") for weight in w3],
            permuted_weights=True,
            activation="silu",
            experts_min=0,
            experts_max=1,
        )


def test_weights_of_four_bits(card: Any) -> None:
    """ops/hpu_awq.py, hpu_gptq.py and hpu_compressed_tensors.py: the lowest bits first, zero points packed alike."""
    torch.manual_seed(0)
    weight, zeros, scale = torch.randint(16, (4, 16)), torch.randint(16, (2, 16)), torch.rand(2, 16)

    def pack(values: torch.Tensor) -> torch.Tensor:
        shifted = values.view(len(values), -1, 8) << torch.arange(0, 32, 4)
        return shifted.sum(-1).to(torch.uint32).view(torch.int32).to("hpu")

    def run(*more: Any) -> torch.Tensor:
        out: torch.Tensor = torch.ops.hpu.convert_from_uint4(pack(weight), scale.to("hpu"), *more)
        return out.cpu()

    rows = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(run(pack(zeros), torch.float32), (weight - zeros[rows]) * scale[rows])
    torch.testing.assert_close(run(None, torch.float32), weight * scale[rows])
    order = torch.tensor([1, 0, 1, 0])
    by_order = run(pack(zeros), torch.float32, order.to(torch.int32).to("hpu"))
    torch.testing.assert_close(by_order, (weight - zeros[order]) * scale[order])


def test_fp8_in_bfloat16_rounds_scale_and_sum(card: Any) -> None:
    """tests/unit_tests/ops/test_hpu_compressed_tensors.py: two layers with static scales, met bit for bit by this."""
    x = torch.tensor([[1.0625, 3.0]]).bfloat16()
    scale = torch.tensor(1.00390625)  # between 1 and the next of bfloat16: rounds to 1
    cast = torch.ops.hpu.cast_to_fp8_v2
    assert cast(x.to("hpu"), (scale * 257 / 256).to("hpu"), False, False, torch.float8_e4m3fn)[0].float().tolist() == [
        [1.125, 3.0]
    ]
    left, right = to_e4m3(torch.tensor([[16.0, 0.0625]]), 240.0), to_e4m3(torch.tensor([[16.0], [16.0]]), 240.0)
    arguments = (left.to("hpu"), False, right.to("hpu"), False, None)
    inverse = torch.tensor(1.00390625).to("hpu")
    assert torch.ops.hpu.fp8_gemm_v2(*arguments, torch.float32, inverse).item() == 257 * 1.00390625
    assert torch.ops.hpu.fp8_gemm_v2(*arguments, torch.bfloat16, inverse).item() == 256.0
