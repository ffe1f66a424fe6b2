"""The experts of Gaudi: who is chosen, with what weight, and what they compute, against plain loops over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor import custom_op
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_gaudi_spec.config import UnsupportedConfigError


@pytest.fixture(scope="module", autouse=True)
def only_here() -> Iterator[None]:
    """What registers itself here shall not be in models of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_op, "op_registry_oot", {})
        yield


def choose(scores: list[float], wanted: list[float], groups: int, top_groups: int, top_k: int) -> dict[int, float]:
    """Of one token: expert -> its score."""
    size = len(wanted) // groups
    best = {
        g: sum(sorted(wanted[g * size : (g + 1) * size])[-2 if wanted is not scores else -1 :]) for g in range(groups)
    }
    open_groups = sorted(best, key=best.__getitem__)[-top_groups:]
    candidates = [e for g in open_groups for e in range(g * size, (g + 1) * size)]
    return {e: scores[e] for e in sorted(candidates, key=wanted.__getitem__)[-top_k:]}


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_routing(scoring: str, groups: int, top_groups: int, renormalize: bool, biased: bool) -> None:
    from vllm_gaudi_spec.devices.common.dense_experts import route

    torch.manual_seed(0)
    logits, bias = torch.randn(30, 16), torch.randn(16) * 0.3
    weights = route(
        logits,
        top_k=3,
        scoring=scoring,
        renormalize=renormalize,
        bias_E=bias if biased else None,
        num_groups=groups,
        top_groups=top_groups,
    )
    for token, row in enumerate(logits):
        probs = row.sigmoid() if scoring == "sigmoid" else row.softmax(0)
        scores = probs.tolist()
        wanted = (probs + bias).tolist() if biased else scores
        chosen = choose(scores, wanted, groups, top_groups, top_k=3)
        total = sum(chosen.values()) if renormalize else 1.0
        expected = torch.tensor([chosen.get(expert, 0.0) / total for expert in range(16)])
        torch.testing.assert_close(weights[token], expected)


def best_by_sigmoid(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's own way to choose, as Llama 4 has one."""
    scores, ids = gating_output.topk(topk, dim=-1)
    return scores.sigmoid(), ids.int()


@pytest.mark.parametrize("routes_itself", [False, True])
@pytest.mark.parametrize("weighted_inputs", [False, True])
@pytest.mark.parametrize("own", [None, (0, 3), (3, 3)])
def test_experts(own: tuple[int, int] | None, weighted_inputs: bool, routes_itself: bool) -> None:
    """All of them; or under expert parallelism a part, whose sum over ranks is what all compute."""
    from vllm_gaudi_spec.devices.common.dense_experts import DenseExperts, route

    torch.manual_seed(0)
    experts, hidden, inner = 6, 8, 5
    layer: Any = SimpleNamespace(
        top_k=2,
        custom_routing_function=best_by_sigmoid if routes_itself else None,
        apply_router_weight_on_input=weighted_inputs,
        scoring_func="softmax",
        renormalize=True,
        e_score_correction_bias=None,
        use_grouped_topk=False,
        num_expert_group=None,
        topk_group=None,
        routed_scaling_factor=1.5,
        activation=MoEActivation.SILU,
        w13_weight=torch.randn(experts, 2 * inner, hidden),
        w2_weight=torch.randn(experts, hidden, inner),
    )
    x, logits = torch.randn(7, hidden), torch.randn(7, experts)
    weights = route(logits, top_k=2, scoring="softmax", renormalize=True) * 1.5
    if routes_itself:
        weights = torch.where(logits >= logits.topk(2).values[:, 1:], logits.sigmoid(), 0.0) * 1.5
    here: Any = SimpleNamespace(local_experts=own, moe=SimpleNamespace(num_experts=experts, has_bias=False))
    mine = range(experts) if own is None else range(own[0], sum(own))
    all_w13, all_w2 = layer.w13_weight, layer.w2_weight
    layer.w13_weight, layer.w2_weight = all_w13[list(mine)], all_w2[list(mine)]
    ours = DenseExperts.apply_monolithic(here, layer, x, logits)
    for token in range(7):
        expected = torch.zeros(hidden)
        for expert in set(weights[token].nonzero()[:, 0].tolist()) & set(mine):
            weight = weights[token, expert]
            gate, up = (all_w13[expert] @ (x[token] * (weight if weighted_inputs else 1))).chunk(2)
            result = all_w2[expert] @ (torch.nn.functional.silu(gate) * up)
            expected += result if weighted_inputs else weight * result
        torch.testing.assert_close(ours[token], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("own", [None, (0, 3), (3, 3)])
def test_experts_of_gpt_oss(own: tuple[int, int] | None) -> None:
    """Biases, and gates that alternate with what they open or close, clamped on one side."""
    from vllm_gaudi_spec.devices.common.dense_experts import DenseExperts

    torch.manual_seed(0)
    experts, hidden, inner = 6, 8, 5
    w13, b13 = torch.randn(experts, 2 * inner, hidden) * 4, torch.randn(experts, 2 * inner)
    w2, b2 = torch.randn(experts, hidden, inner), torch.randn(experts, hidden)
    x, logits = torch.randn(7, hidden), torch.randn(7, experts)
    mine = range(experts) if own is None else range(own[0], sum(own))
    layer: Any = SimpleNamespace(
        top_k=2,
        custom_routing_function=None,
        apply_router_weight_on_input=False,
        scoring_func="softmax",
        renormalize=True,
        e_score_correction_bias=None,
        use_grouped_topk=False,
        num_expert_group=None,
        topk_group=None,
        routed_scaling_factor=1.0,
        activation=MoEActivation.SWIGLUOAI,
        w13_weight=w13[list(mine)],
        w13_bias=b13[list(mine)],
        w2_weight=w2[list(mine)],
        w2_bias=b2[list(mine)],
    )
    here: Any = SimpleNamespace(local_experts=own, moe=SimpleNamespace(num_experts=experts, has_bias=True))
    ours = DenseExperts.apply_monolithic(here, layer, x, logits)
    clamped = 0
    for token in range(7):
        chosen = logits[token].topk(2)
        expected = torch.zeros(hidden)
        for weight, expert in zip(chosen.values.softmax(0), chosen.indices.tolist(), strict=True):
            if expert not in mine:
                continue
            products = w13[expert] @ x[token] + b13[expert]
            gate, up = products[::2].clamp(max=7.0), products[1::2].clamp(-7.0, 7.0)
            clamped += int((products.abs() > 7.0).sum())
            expected += weight * (w2[expert] @ (gate * (1.702 * gate).sigmoid() * (up + 1)) + b2[expert])
        torch.testing.assert_close(ours[token], expected, atol=1e-4, rtol=1e-4)
    assert clamped > 10


def test_m12_only_logits_of_the_experts_route() -> None:
    """Where vLLM routes in its runner, hidden states come in their place."""
    from vllm_gaudi_spec.devices.common.dense_experts import DenseExperts

    here: Any = SimpleNamespace(local_experts=None, moe=SimpleNamespace(num_experts=6))
    hidden = torch.zeros(7, 8)
    with pytest.raises(ValueError, match="6 experts are routed by 8 logits"):
        DenseExperts.apply_monolithic(here, SimpleNamespace(), hidden, hidden)


def test_local_experts() -> None:
    from vllm_gaudi_spec.devices.common.dense_experts import _local_experts

    assert _local_experts(None) is None
    assert _local_experts(torch.tensor([-1, -1, 0, 1, -1])) == (2, 2)
    with pytest.raises(UnsupportedConfigError, match="--expert-placement-strategy linear"):
        _local_experts(torch.tensor([0, -1, 1, -1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shares", [True, False])
def test_l06_outputs_are_scaled_as_vllm_does_but_not_in_place(dtype: torch.dtype, shares: bool) -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from vllm_gaudi_spec.devices.common.dense_experts import VisibleRunner

    outputs = torch.ones(3, dtype=dtype) if shares else None, torch.ones(3, dtype=dtype)
    runner: Any = SimpleNamespace(routed_scaling_factor=2.5)
    ours = VisibleRunner._maybe_apply_routed_scale_to_output(runner, *outputs)
    assert all(output is None or torch.equal(output, torch.ones(3, dtype=dtype)) for output in outputs)
    theirs = MoERunner._maybe_apply_routed_scale_to_output(runner, *outputs)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)
    runner.routed_scaling_factor = 1.0
    assert VisibleRunner._maybe_apply_routed_scale_to_output(runner, *outputs) == outputs
