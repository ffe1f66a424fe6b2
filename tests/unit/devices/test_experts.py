"""Mixtures of experts: routing, and each form of the computation against plain loops over tokens."""

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from card_emulator.gaudi.experts import fused_weights
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.ascend import experts as ascend_experts
from vllm_gaudi_spec.devices.common import experts
from vllm_gaudi_spec.devices.common.experts import Call, Form, Fused
from vllm_gaudi_spec.devices.cuda import experts as cuda_experts
from vllm_gaudi_spec.devices.hpu import experts as hpu_experts


def choose(scores: list[float], wanted: list[float], groups: int, top_groups: int, top_k: int) -> dict[int, float]:
    """Return the scores of one token's experts, by expert."""
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
    torch.manual_seed(0)
    logits, bias = torch.randn(30, 16), torch.randn(16) * 0.3
    weights = experts.route(
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


# --- forms ---


def by_counts(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def gaudis(call: Call) -> torch.Tensor:
    """Gaudi's operator as the emulated card has it."""

    def mixture(**given: Any) -> torch.Tensor:
        x, table, router = (given.pop(name) for name in ("hidden_states", "expert_routing_table", "router_weights"))
        return fused_weights(
            x, table, router, given.pop("w12"), given.pop("w3"), given.pop("permuted_weights"), **given
        )

    return fused_of(hpu_experts, mixture).run(call)


def npu_grouped_matmul(rows: Any, matrices: Any, **how: Any) -> list[torch.Tensor]:
    """A stand-in with one tensor of rows, grouped by sizes, as in tests/emulated_cann."""
    counts = how.pop("group_list")
    assert how == dict(split_item=2, group_type=0, group_list_type=1)
    return [by_counts(rows[0], matrices[0], counts)]


def fused_of(device: ModuleType, kernel: Callable[..., Any] = torch.nn.functional.grouped_mm) -> Fused:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "find_kernel", lambda module, name: kernel)
        fused = device.fused()
    assert isinstance(fused, Fused)
    return fused


def in_slices(call: Call) -> torch.Tensor:
    """Compute two experts at once, and a single one at the end if there are three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_ROWS_AT_ONCE", 2 * len(call.x_TH))
        return experts.dense(call)


FORMS: dict[str, Form] = {
    "dense": experts.dense,
    "in slices": in_slices,
    "gathered": experts.gathered,
    "grouped": partial(experts.grouped, by_counts),
    "CUDA's": lambda call: fused_of(cuda_experts).run(call),
    "NPU's": lambda call: fused_of(ascend_experts, npu_grouped_matmul).run(call),
    "Gaudi's": gaudis,
}
PLAIN = [name for name in FORMS if name != "Gaudi's"]
EXPERTS, HIDDEN, INNER, TOP_K = 6, 8, 4, 2
PARTS = [None, (0, 3), (3, 3)]
"""Under expert parallelism: the first expert of a rank, and their number."""


def best_by_sigmoid(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's own routing function, like Llama 4's."""
    scores, ids = gating_output.topk(topk, dim=-1)
    return scores.sigmoid(), ids.int()


def some_logits() -> torch.Tensor:
    """Return router logits in which the first two tokens choose experts of their own."""
    logits = torch.randn(7, EXPERTS)
    logits[0, 4:] += 6.0
    logits[1, 2:4] += 6.0
    return logits


class Model:
    """A layer with all experts, or one rank's, and the calls that vLLM makes."""

    def __init__(self, local: tuple[int, int] | None, has_bias: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.w13, self.b13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 2, torch.randn(EXPERTS, 2 * INNER)
        self.w2, self.b2 = torch.randn(EXPERTS, HIDDEN, INNER), torch.randn(EXPERTS, HIDDEN)
        self.local = list(range(EXPERTS) if local is None else range(local[0], sum(local)))
        defaults: dict[str, Any] = dict(
            top_k=TOP_K,
            custom_routing_function=None,
            apply_router_weight_on_input=False,
            scoring_func="softmax",
            renormalize=True,
            e_score_correction_bias=None,
            use_grouped_topk=False,
            num_expert_group=None,
            topk_group=None,
            routed_scaling_factor=1.5,
            activation=MoEActivation.SILU,
        )
        weights = {f"{name}_weight": getattr(self, name)[self.local] for name in ("w13", "w2")}
        if has_bias:
            weights |= {f"w{name[1:]}_bias": getattr(self, name)[self.local] for name in ("b13", "b2")}
        self.layer: Any = SimpleNamespace(**defaults | options | weights)
        self.method: Any = SimpleNamespace(
            local_experts=local, fused=None, moe=SimpleNamespace(num_experts=EXPERTS, has_bias=has_bias)
        )

    def run(self, form: str, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "choose_form", lambda call, fused: FORMS[form])
            return experts.Experts.apply_monolithic(self.method, self.layer, x, logits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("routing", ["softmax", "its own", "groups"])
@pytest.mark.parametrize("weighs_inputs", [False, True])
@pytest.mark.parametrize("local", PARTS)
def test_experts(local: tuple[int, int] | None, weighs_inputs: bool, routing: str, form: str) -> None:
    """With all experts, or with one part under expert parallelism; the ranks' sum is the result of all."""
    if weighs_inputs and form not in PLAIN:
        pytest.skip("not taken")
    bias = torch.tensor([0.0, 0.3, -0.2, 0.1, 0.4, -0.3])
    options: dict[str, Any] = {
        "softmax": {},
        "its own": dict(custom_routing_function=best_by_sigmoid),
        "groups": dict(
            scoring_func="sigmoid",
            e_score_correction_bias=bias,
            use_grouped_topk=True,
            num_expert_group=3,
            topk_group=2,
        ),
    }[routing]
    model = Model(local, apply_router_weight_on_input=weighs_inputs, **options)
    x, logits = torch.randn(7, HIDDEN), some_logits()
    found = model.run(form, x, logits)
    # Two tokens cannot choose all experts.
    torch.testing.assert_close(model.run(form, x[:2], logits[:2]), found[:2], atol=1e-4, rtol=1e-4)
    for token, row in enumerate(logits):
        if routing == "its own":
            chosen = {e: float(row[e].sigmoid()) for e in row.topk(TOP_K).indices.tolist()}
        elif routing == "groups":
            chosen = choose(row.sigmoid().tolist(), (row.sigmoid() + bias).tolist(), 3, 2, TOP_K)
        else:
            chosen = {e: float(row.softmax(0)[e]) for e in row.topk(TOP_K).indices.tolist()}
        total = 1.0 if routing == "its own" else sum(chosen.values())
        expected = torch.zeros(HIDDEN)
        for expert in set(chosen) & set(model.local):
            weight = chosen[expert] / total * 1.5
            gate, up = (model.w13[expert] @ (x[token] * (weight if weighs_inputs else 1))).chunk(2)
            result = model.w2[expert] @ (torch.nn.functional.silu(gate) * up)
            expected += result if weighs_inputs else weight * result
        torch.testing.assert_close(found[token], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("local", PARTS)
def test_experts_of_gpt_oss(local: tuple[int, int] | None, form: str) -> None:
    """With biases, and clamped gates that alternate with what they multiply."""
    model = Model(local, has_bias=True, activation=MoEActivation.SWIGLUOAI, routed_scaling_factor=1.0)
    x, logits = torch.randn(7, HIDDEN) * 2, some_logits()
    found = model.run(form, x, logits)
    torch.testing.assert_close(model.run(form, x[:2], logits[:2]), found[:2], atol=1e-4, rtol=1e-4)
    clamped = 0
    for token in range(7):
        chosen = logits[token].topk(TOP_K)
        expected = torch.zeros(HIDDEN)
        for weight, expert in zip(chosen.values.softmax(0), chosen.indices.tolist(), strict=True):
            if expert not in model.local:
                continue
            products = model.w13[expert] @ x[token] + model.b13[expert]
            gate, up = products[::2].clamp(max=7.0), products[1::2].clamp(-7.0, 7.0)
            clamped += int((products.abs() > 7.0).sum())
            expected += weight * (model.w2[expert] @ (gate * (1.702 * gate).sigmoid() * (up + 1)) + model.b2[expert])
        torch.testing.assert_close(found[token], expected, atol=1e-4, rtol=1e-4)
    assert clamped > 10


def test_m03_gaudi_operator_has_only_the_tanh_gelu() -> None:
    model = Model(None, activation=MoEActivation.GELU_TANH)
    x, logits = torch.randn(7, HIDDEN), torch.randn(7, EXPERTS)
    torch.testing.assert_close(model.run("Gaudi's", x, logits), model.run("dense", x, logits))


@pytest.mark.parametrize("local", PARTS)
def test_m01_m02_gaudi_operator_gets_ids_of_this_rank(local: tuple[int, int] | None) -> None:
    """Ids count from 0, and the last one is included.

    In torch's form, ids that are out of range or repeated break a scatter. A token without an expert here has some with
    weight 0.
    """
    seen: dict[str, Any] = {}

    def mixture(**given: Any) -> torch.Tensor:
        seen.update(given)
        return given["hidden_states"]

    model = Model(local)
    x, logits = torch.randn(7, HIDDEN).bfloat16(), torch.randn(7, EXPERTS)
    for name in ("w13_weight", "w2_weight"):
        setattr(model.layer, name, getattr(model.layer, name).bfloat16())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "choose_form", lambda call, fused: fused_of(hpu_experts, mixture).run)
        experts.Experts.apply_monolithic(model.method, model.layer, x, logits)
    table = seen["expert_routing_table"]
    assert table.dtype == torch.int64
    assert seen["router_weights"].dtype == torch.bfloat16
    assert (seen["experts_min"], seen["experts_max"]) == (0, len(model.local) - 1)
    assert [weight.shape for weight in seen["w12"]] == [(2 * INNER, HIDDEN)] * len(model.local)
    assert [weight.shape for weight in seen["w3"]] == [(HIDDEN, INNER)] * len(model.local)
    for token, ids in enumerate(table.tolist()):
        assert len(set(ids)) == TOP_K
        assert set(ids) <= set(range(len(model.local)))
        used = {model.local[e] for e, weight in zip(ids, seen["router_weights"][token].tolist(), strict=True) if weight}
        assert used == set(logits[token].topk(TOP_K).indices.tolist()) & set(model.local)


def call_of(tokens: int, num_experts: int, top_k: int, **options: Any) -> Call:
    sizes = dict(x_TH=(tokens, 16), weights_TE=(tokens, num_experts), w13_EJH=(num_experts, 32, 16))
    tensors = {name: torch.zeros(size) for name, size in (sizes | dict(w2_EHI=(num_experts, 16, 16))).items()}
    defaults: dict[str, Any] = dict(b13_EJ=None, b2_EH=None, activation=MoEActivation.SILU, weighs_inputs=False)
    return Call(**tensors | defaults | options, top_k=top_k)


def test_m03_calls_supported_by_the_gaudi_operator() -> None:
    call = call_of(2048, 8, 2)
    assert hpu_experts._takes(call)
    assert not hpu_experts._takes(call._replace(b13_EJ=torch.zeros(8, 32)))
    assert not hpu_experts._takes(call._replace(weighs_inputs=True))
    assert not hpu_experts._takes(call._replace(activation=MoEActivation.SWIGLUOAI))


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "taken"),
    [
        (torch.bfloat16, (9, 0), 16, True),
        (torch.bfloat16, (10, 0), 16, True),
        (torch.bfloat16, (12, 0), 16, False),
        (torch.bfloat16, (8, 0), 16, False),
        (torch.float16, (9, 0), 16, False),
        (torch.bfloat16, (9, 0), 12, False),
    ],
)
def test_calls_supported_by_the_cuda_grouped_product(
    dtype: torch.dtype, capability: tuple[int, int], width: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls are computed after a read on the host, which a captured graph cannot have."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = SimpleNamespace(dtype=dtype, device="cuda", is_cuda=True)
    call = call_of(8, 4, 2)._replace(x_TH=x, w13_EJH=torch.zeros(4, 16, width), w2_EHI=torch.zeros(4, width, 8))
    assert cuda_experts._takes(call) is taken


@pytest.mark.parametrize("first", range(EXPERTS - TOP_K + 1))
@pytest.mark.parametrize("form", ["dense", "gathered"])
def test_nan_in_one_row_does_not_reach_others(form: str, first: int) -> None:
    model = Model(None)
    # Only some are gathered.
    x, logits = torch.randn(2, HIDDEN), torch.zeros(2, EXPERTS)
    logits[0, first : first + TOP_K] = torch.tensor([5.0, 4.0])
    expected = model.run("dense", x, logits)
    logits[1] = torch.nan
    torch.testing.assert_close(model.run(form, x, logits)[0], expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["dense", "gathered", "grouped"])
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_float16_overflow_affects_only_tokens_that_chose_the_expert(form: str, weighs_inputs: bool) -> None:
    call = call_of(2, 4, 1)
    w13, w2 = torch.full((4, 8, 4), 0.5, dtype=torch.float16), torch.ones(4, 4, 4, dtype=torch.float16)
    w13[3] = 200.0
    weights = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float16)
    call = call._replace(
        x_TH=torch.ones(2, 4, dtype=torch.float16),
        weights_TE=weights,
        w13_EJH=w13,
        w2_EHI=w2,
        b13_EJ=None,
        b2_EH=None,
        weighs_inputs=weighs_inputs,
    )
    found = FORMS[form](call)
    assert found.isfinite().all()
    assert found[0].any()
    assert not found[1].any()


def test_more_weights_than_are_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(None)
    x, logits = torch.randn(2, HIDDEN), some_logits()[:2]
    expected = model.run("dense", x, logits)
    monkeypatch.setattr(experts, "GATHERED_BYTES_AT_ONCE", 1)
    torch.testing.assert_close(model.run("gathered", x, logits), expected, atol=1e-4, rtol=1e-4)


def test_rows_with_scores_of_zero() -> None:
    weights = experts.route(torch.full((1, 4), -200.0), top_k=2, scoring="sigmoid", renormalize=True)
    assert weights.isfinite().all()


def test_npu_e08_groups_of_one_tensor() -> None:
    """DeepSeek-V3 has 256 experts, Qwen3-Next 512."""
    assert ascend_experts._takes(call_of(2, 1024, 2))
    assert not ascend_experts._takes(call_of(2, 1025, 2))


class Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [result] if isinstance(result, torch.Tensor) else result if isinstance(result, (list, tuple)) else []
        self.nbytes = max(self.nbytes, *(tensor.nbytes for tensor in tensors))
        return result


@pytest.mark.parametrize("form", ["dense", "grouped"])
def test_l14_no_tensor_of_all_experts_and_all_tokens(form: str) -> None:
    tokens, num_experts, top_k = 2048, 64, 2
    call = call_of(tokens, num_experts, top_k)
    with Largest() as largest:
        FORMS[form](call)
    bound = {"dense": experts._ROWS_AT_ONCE, "grouped": tokens * top_k}[form]
    assert largest.nbytes <= 4 * max(bound * 32, tokens * num_experts)
    assert largest.nbytes * 4 <= 4 * tokens * num_experts * 16


def test_m12_hidden_states_are_refused_as_router_logits() -> None:
    """vLLM passes hidden states if it routes in its runner."""
    here: Any = SimpleNamespace(local_experts=None, moe=SimpleNamespace(num_experts=6))
    hidden = torch.zeros(7, 8)
    with pytest.raises(ValueError, match="router logits for 6 experts, but got 8"):
        experts.Experts.apply_monolithic(here, SimpleNamespace(), hidden, hidden)


# --- vLLM's layers ---


def test_local_experts() -> None:
    assert experts._find_local_experts(None) is None
    assert experts._find_local_experts(torch.tensor([-1, -1, 0, 1, -1])) == (2, 2)
    with pytest.raises(UnsupportedConfigError, match="--expert-placement-strategy linear"):
        experts._find_local_experts(torch.tensor([0, -1, 1, -1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shares", [True, False])
def test_l06_outputs_are_scaled_as_vllm_does_but_not_in_place(dtype: torch.dtype, shares: bool) -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    outputs = torch.ones(3, dtype=dtype) if shares else None, torch.ones(3, dtype=dtype)
    runner: Any = SimpleNamespace(routed_scaling_factor=2.5)
    ours = experts.VisibleRunner._maybe_apply_routed_scale_to_output(runner, *outputs)
    assert all(output is None or torch.equal(output, torch.ones(3, dtype=dtype)) for output in outputs)
    theirs = MoERunner._maybe_apply_routed_scale_to_output(runner, *outputs)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)
    runner.routed_scaling_factor = 1.0
    assert experts.VisibleRunner._maybe_apply_routed_scale_to_output(runner, *outputs) == outputs
