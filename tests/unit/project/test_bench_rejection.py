"""The benchmark of acceptance rules checks what it times, and adds up the cells that count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import rejection

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.rules.registry import TORCH


def test_the_reference_passes_the_checks() -> None:
    found = rejection.check(TORCH, "cpu", [(5, 3, 100)])
    assert set(found["rows that tie"].values()) == {0}
    assert len(found["acceptance, standard deviations off"]) == 3


@pytest.mark.parametrize("rule", ["greedy", "standard", "block"])
def test_a_wrong_rule_does_not(rule: str) -> None:
    def accept_all(verify: Callable[..., Verification]) -> Callable[..., Verification]:
        def run(*inputs: torch.Tensor) -> Verification:
            verification = verify(*inputs)
            return verification._replace(num_sampled_B=torch.full_like(verification.num_sampled_B, 2))

        return run

    generous = TORCH._replace(
        strict_greedy=accept_all(TORCH.strict_greedy),
        verify={name: accept_all(TORCH.verify[name]) for name in ("standard", "block")},
    )
    if rule in ("standard", "block"):
        with pytest.raises(AssertionError, match="differ from the reference"):
            rejection.check_equal(generous, rejection.make_case(rule, 50, 1, 100, "cpu", 1))
    with pytest.raises(AssertionError, match="accepted"):
        rejection.check_rate(lambda case: rejection.judge(generous, case), rule, "cpu")


def test_only_large_cells_count() -> None:
    cells = [
        rejection.Cell("strict", 1, 8, 256_000, 1.0, {"ours": 2.0, "newer": 1.0}, 10**9, 10**9),
        rejection.Cell("strict", 8, 8, 256_000, 1.0, {"ours": 1.0, "newer": 2.0, "older": 3.0}, 10**9, 10**9),
        rejection.Cell("strict", 8, 8, 128_256, 1.0, {"ours": 2.0, "newer": 1.0}, 10**9, 63 * 10**6),
        rejection.Cell("strict", 32, 8, 256_000, 1.0, {"ours": 1.0, "newer": 8.0, "older": 9.0}, 10**9, 10**9),
    ]
    strict, everything = rejection.summary(cells, 2e9)
    assert strict == everything | {"rule": "strict"}
    assert (strict["cells"], strict["share_as_fast"], strict["least_ratio"]) == (2, 1.0, 2.0)
    assert strict["geometric_mean"] == pytest.approx(4)
    assert strict["least_share_must_read"] == 0.5
    assert (strict["reach_70_must_read"], strict["reach_70_logits"]) == (0, 0)


def test_bytes_that_must_be_read() -> None:
    """For the rules that decide place by place nothing behind a rejection."""
    logits = 4 * 8 * 5 * 1000
    assert rejection.must_read("strict", 8, 4, 1000, 4.0) == rejection.must_read("greedy", 8, 4, 1000, 4.0) == logits
    assert rejection.must_read("strict", 8, 4, 1000, 1.0) == logits * 2 / 5
    assert rejection.must_read("standard", 8, 4, 1000, 1.0) == logits + 4 * 8 * 1000
    assert rejection.must_read("block", 8, 4, 1000, 1.0) == logits + 4 * 8 * 4 * 1000
