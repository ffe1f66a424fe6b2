"""Patches of routing still have their reasons: these fail when upstream moves; then review the patch."""

from __future__ import annotations

import inspect

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.devices.common.experts import route

TOKENS, EXPERTS, TOP_K = 5, 8, 3


def test_cpu_experts_are_scored_by_sigmoid_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream's router does so by itself: then the patch can go."""
    torch.manual_seed(0)
    logits_TE, bias_E = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)
    sizes = dict(top_k=TOP_K, global_num_experts=EXPERTS, scoring_func="sigmoid", e_score_correction_bias=bias_E)
    monkeypatch.setattr(CPURouter, "__init__", inspect.unwrap(CPURouter.__init__))
    with pytest.raises(AssertionError):
        CPURouter(**sizes)._compute_routing(logits_TE, logits_TE, None)
    upstream.score_cpu_experts_by_sigmoid()
    weights_TK, ids_TK = CPURouter(**sizes)._compute_routing(logits_TE, logits_TE, None)
    found_TE = torch.zeros(TOKENS, EXPERTS).scatter(1, ids_TK.long(), weights_TK)
    expected_TE = route(logits_TE, top_k=TOP_K, scoring="sigmoid", renormalize=True, bias_E=bias_E)
    torch.testing.assert_close(found_TE, expected_TE)
    softmax = CPURouter(**sizes | dict(scoring_func="softmax", e_score_correction_bias=None))
    assert not softmax.use_grouped_topk
