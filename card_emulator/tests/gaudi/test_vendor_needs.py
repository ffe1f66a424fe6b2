"""What software that runs on cards does, and the emulated card did not take: one test each, with who does it.

Unless another is named that is vllm-gaudi v0.26.0; `make verify-vendor` runs it as a whole.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from card_emulator.card import DeviceRefusal
from card_emulator.kernels import to_e4m3
from card_emulator.testing import graph, hpu, ids


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


def test_data_of_a_parameter_is_changed_in_place(card: Any) -> None:
    """tests/unit_tests/ops/test_hpu_layernorm.py: `weight.data.normal_()`, outside of no_grad."""
    with torch.inference_mode(False):
        weight = torch.nn.Parameter(torch.zeros(2, device="hpu"))
        weight.data.fill_(3)
        assert weight.requires_grad
        weight.data = hpu(4, 5).clone()
    assert weight.tolist() == [4.0, 5.0]


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


def test_indices_in_a_list(card: Any) -> None:
    """hpu_input_batch.py: `self.temperature[req_indices]`."""
    x = hpu(1, 2, 3)
    assert x[[2, 0]].tolist() == [3.0, 1.0]
    x[[0, 1]] = 7.0
    assert x.tolist() == [7.0, 7.0, 3.0]


def test_a_file_is_read_onto_the_card(card: Any, tmp_path: Path) -> None:
    """tests/unit_tests/ops/test_hpu_fp8.py: safe_open(..., device="hpu")."""
    save_file({"x": torch.arange(3.0)}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt", device="hpu") as file:
        x = file.get_tensor("x")
    assert x.device.type == "hpu"
    assert x.tolist() == [0.0, 1.0, 2.0]


def test_asarray_keeps_its_values(card: Any) -> None:
    assert torch.asarray([1, 2], device="hpu").tolist() == [1, 2]


def test_a_tensor_changes_its_geometry(card: Any) -> None:
    """vLLM's update_tensor_inplace (layers/quantization/utils), after which vllm-gaudi's 4-bit layers are loaded."""
    x = torch.arange(6.0).to("hpu").view(2, 3)
    x.as_strided_((3, 2), (1, 3))
    assert x.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    x.t_()
    assert (x.shape, x.tolist()) == ((2, 3), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    before = torch.hpu.memory_allocated()
    assert x.resize_(100).shape == (100,)
    assert torch.hpu.memory_allocated() == before + 400 - 24
    other = hpu(8, 9)
    assert x.set_(other).tolist() == [8.0, 9.0]
    other.zero_()
    assert x.tolist() == [0.0, 0.0]


def test_the_backend_of_compile_has_its_name(card: Any) -> None:
    """`@torch.compile(backend="hpu_backend")` is found when it decorates; platform.py has dynamo off in lazy mode."""
    with torch._dynamo.config.patch(disable=False), torch.compiler.set_stance("default"):
        compiled = torch.compile(lambda x: x + 1, backend="hpu_backend")
        with pytest.raises(Exception, match="lazy mode"):
            compiled(torch.ones(1))
    with torch._dynamo.config.patch(disable=True):
        assert torch.compile(lambda x: x + 1, backend="hpu_backend")(hpu(1)).tolist() == [2.0]


def test_parts_of_torch_hpu(card: Any) -> None:
    """platform.py, manual_seed_all; tests of graphs, input_hash; torch.load, which asks for torch.hpu.device."""
    importlib.import_module("torch.hpu.random").manual_seed_all(5)
    first = torch.rand(3, device="hpu").tolist()
    torch.hpu.random.manual_seed_all(5)
    assert torch.rand(3, device="hpu").tolist() == first
    assert torch.hpu.graphs.input_hash((hpu(1), 2)) == torch.hpu.graphs.input_hash((hpu(3), 2))
    assert torch.hpu.graphs.input_hash((hpu(1), 2)) != torch.hpu.graphs.input_hash((hpu(1, 1), 2))
    with torch.hpu.device(0):
        assert torch.accelerator.current_stream() is torch.hpu.current_stream()
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    x = hpu(1)
    assert experimental._data_ptr(x) == x.data_ptr()


class _Output(dict[str, Any]):
    """As transformers' ModelOutput: items are attributes as well."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        setattr(self, name, value)


def test_a_graph_returns_records_of_their_class(card: Any) -> None:
    """optimum-habana 1.21, generation/utils.py: `outputs.logits`, beside a cache that the model passes through."""

    def forward(x: torch.Tensor) -> _Output:
        out = _Output()
        out["logits"], out["cache"] = x + 1, x
        return out

    run = graph(forward)
    assert run(hpu(1)).logits.tolist() == [2.0]
    again = hpu(2)
    replayed = run(again)
    assert replayed.logits.tolist() == [3.0]
    assert replayed.cache is again


# --- operations ---


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
    with pytest.raises(DeviceRefusal, match="it takes int64 and the dtype of the hidden states"):
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


def test_a_mixture_of_fp8_experts(card: Any) -> None:
    """extension/ops.py, VllmMixtureOfExpertsOpFP8PerChannel, with dynamic and with static scales."""
    torch.manual_seed(0)
    (w12, w3), x = _experts(2), torch.randn(3, 8)
    table, router = torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.rand(3, 2)
    scales = [[torch.rand(len(w)) / 16 + 0.05 for w in weights] for weights in (w12, w3)]
    packed = [
        [to_e4m3(w / s[:, None], 240.0) for w, s in zip(weights, by, strict=True)]
        for weights, by in zip((w12, w3), scales, strict=True)
    ]
    x8 = to_e4m3(x / 0.02, 240.0)

    def run(**more: Any) -> torch.Tensor:
        out: torch.Tensor = torch.ops.hpu.mixture_of_experts(
            hidden_states=x8.to("hpu"),
            expert_routing_table=table.to("hpu"),
            router_weights=router.to("hpu"),
            w12=[w.to("hpu") for w in packed[0]],
            w3=[w.to("hpu") for w in packed[1]],
            d_scale_hidden_states=hpu(0.02),
            d_scale_w12=[s.to("hpu") for s in scales[0]],
            d_scale_w3=[s.to("hpu") for s in scales[1]],
            permuted_weights=True,
            activation="silu",
            experts_min=0,
            experts_max=1,
            **more,
        )
        return out.cpu()

    wide = [
        [w.float() * s[:, None] for w, s in zip(weights, by, strict=True)]
        for weights, by in zip(packed, scales, strict=True)
    ]
    expected = _by_tokens(x8.float() * 0.02, table, router, *wide, 0)
    torch.testing.assert_close(run(), expected)
    static = run(d_scale_intermediate_hidden_states=[hpu(0.5), hpu(0.5)])
    assert not torch.equal(static, expected)
    torch.testing.assert_close(static, expected, rtol=0.1, atol=0.5)


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


def test_scales_that_are_numbers(card: Any) -> None:
    """The bridge's overloads, v1.19, kernels_register.cpp."""
    x = torch.tensor([[1.5, -2.0]]).to("hpu")
    cast, gemm, back = torch.ops.hpu.cast_to_fp8_v2, torch.ops.hpu.fp8_gemm_v2, torch.ops.hpu.cast_from_fp8
    packed = cast.scalar(x, 2.0, False, False, torch.float8_e4m3fn)[0]
    assert packed.float().tolist() == [[3.0, -4.0]]
    assert back.scalar(packed, 0.5, torch.float32).tolist() == x.tolist()
    listed = cast.scalar_list(x, [2.0, 4.0], False, False, torch.float8_e4m3fn)[0]
    assert listed.float().tolist() == [[3.0, -8.0]]
    assert back.scalar_list(listed, [0.5, 0.25], torch.float32).tolist() == x.tolist()
    weight = cast(x, None, False, False, torch.float8_e4m3fn)[0]
    assert gemm.scalar(packed, False, weight, True, None, torch.float32, 0.5, 2.0).tolist() == [[12.5]]
    assert gemm.scalar_list(packed, False, weight, True, None, torch.float32, [0.5], [2.0]).tolist() == [[12.5]]


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


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_in_slices(card: Any, grouped: bool) -> None:
    """extension/utils.py, SlicedFusedSDPA: maxima and inverse sums put two slices of keys together."""
    grouping = importlib.import_module("habana_frameworks.torch.hpex.kernels.FusedSDPA")
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = torch.zeros(1, 1, 3, 6)
    mask[..., 5] = -torch.inf
    ours = [part.to("hpu") for part in (q, k, v, mask)]
    assert grouping.is_gqa(*ours[:2])
    if grouped:
        ours = grouping.gqa_input_reshape_fwd(*ours)

    def attend(keys: slice) -> Any:
        k, v, mask = ours[1][..., keys, :], ours[2][..., keys, :], ours[3][..., keys]
        out = torch.ops.hpu.sdpa_recomp_fwd(ours[0], k, v, mask, 0.0, 0.3, False, True, "fp32", None, "right")
        return [grouping.gqa_output_reshape(part).cpu() if grouped else part.cpu() for part in out[:3]]

    (one, top, inverse), (two, other_top, other_inverse) = attend(slice(0, 4)), attend(slice(4, 6))
    highest = torch.maximum(top, other_top)
    sums = torch.exp(top - highest) / inverse, torch.exp(other_top - highest) / other_inverse
    merged = (one * sums[0] + two * sums[1]) / (sums[0] + sums[1])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(merged, expected)


def test_fp8_attention(card: Any) -> None:
    """extension/utils.py, ModuleFP8FusedSDPA; and what it multiplies the inverse sums of "fast" with."""
    from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

    torch.manual_seed(0)
    parts = [to_e4m3(torch.randn(1, 2, 3, 8) * 4, 240.0) for _ in range(3)]
    ours, half = [part.to("hpu") for part in parts], hpu(0.5)[0]
    named = {"is_causal": True, "scale": 0.3, "d_scale_q": half, "d_scale_k": half, "d_scale_v": half}
    out = fp8_fused_sdpa(*ours, softmax_mode="None", **named)
    wide = [part.float() / 2 for part in parts]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.3)
    torch.testing.assert_close(out[0].cpu().float(), expected, rtol=0.01, atol=0.01)
    fast = fp8_fused_sdpa(*ours, softmax_mode="fast", q_scale_o=hpu(1)[0], **named)
    assert fast[0].dtype is torch.float8_e4m3fn
    torch.testing.assert_close(fast[2].cpu() * 128, out[2].cpu())


def test_minus_one_pads(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """hpu_model_runner.py pads ids, slots, blocks and groups with -1; extension/ops.py, grouped_max, has a row for it;
    extension/defragmentation.py pads with the slots of block -1."""
    monkeypatch.setattr(card, "model", dataclasses.replace(card.model, counts_from_the_end=True))
    groups, top = ids(0, 0, -1), torch.tensor([[1.0, 1.0], [3.0, 2.0], [9.0, 9.0]]).to("hpu")
    best = torch.full((3, 2), -torch.inf, device="hpu").index_reduce_(0, groups, top, "amax")
    assert best.tolist() == [[3.0, 2.0], [-torch.inf] * 2, [9.0, 9.0]]
    assert best.index_select(0, groups).tolist() == [[3.0, 2.0], [3.0, 2.0], [9.0, 9.0]]
    assert top.index_select(0, ids(-3, -2)).tolist() == [[1.0, 1.0], [3.0, 2.0]]
    assert card.counters.negative_indices == 3
