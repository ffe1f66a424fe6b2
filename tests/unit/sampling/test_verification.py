"""Which acceptance rule applies to which row."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fakes import HostBackend, make_speculation
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.records import Drafts, Verification
from vllm_gaudi_spec.sampling.branches import Branch
from vllm_gaudi_spec.sampling.noise import fold_seed
from vllm_gaudi_spec.sampling.rules import block, standard
from vllm_gaudi_spec.sampling.rules.strict import sample_random, verify
from vllm_gaudi_spec.sampling.verify import Rule, choose_rule

ROWS, K, VOCAB = 64, 3, 12


def rule(name: str, drafting: str) -> Rule:
    return choose_rule(make_speculation(K, rule=name, drafting=drafting, synthetic_rates=(1, 1, 1)), HostBackend())


def test_unknown_rule_is_refused() -> None:
    """It must not run as another rule."""
    with pytest.raises(UnsupportedConfigError, match="method typical is not supported; use one of strict"):
        rule("typical", "greedy")


def case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Drafts, Any]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, K + 1, VOCAB, generator=generator)
    probs = torch.randn(ROWS, K, VOCAB, generator=generator).softmax(-1)
    drafts = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(ROWS, K).int()
    positions = torch.arange(K + 1, dtype=torch.int32).expand(ROWS, -1) + 7
    num = torch.randint(0, K + 1, (ROWS,), generator=generator).int()
    inputs = SimpleNamespace(
        branch=Branch(random=True),
        floats={"temperature": torch.ones(ROWS)},
        keys_B2=torch.tensor([fold_seed(row) for row in range(ROWS)], dtype=torch.int32),
        free_B=None,
    )
    return logits, positions, Drafts(drafts, num, probs), inputs


def texts(verification: Verification) -> list[list[int]]:
    rows = zip(verification.tokens_BQ.tolist(), verification.num_sampled_B.tolist(), strict=True)
    return [row[:count] for row, count in rows]


def strictly(logits: torch.Tensor, positions: torch.Tensor, drafted: Drafts, inputs: Any) -> list[list[int]]:
    sampled = sample_random(logits, inputs.floats["temperature"], inputs.keys_B2, positions)
    return texts(verify(sampled, drafted.tokens_BK, drafted.num_drafts_B))


@pytest.mark.parametrize("name", ["strict", "standard", "block"])
@pytest.mark.parametrize("drafting", ["greedy", "coupled"])
def test_drafts_without_probs_use_strict_rule(name: str, drafting: str) -> None:
    logits, positions, drafted, inputs = case()
    drafted = drafted._replace(probs_BKV=None)
    assert texts(rule(name, drafting)(logits, positions, drafted, inputs)) == strictly(
        logits, positions, drafted, inputs
    )


@pytest.mark.parametrize(("name", "module"), [("standard", standard), ("block", block)])
def test_rows_with_grammar_use_strict_rule(name: str, module: Any) -> None:
    logits, positions, drafted, inputs = case()
    inputs.free_B = torch.arange(ROWS) % 3 > 0
    found = texts(rule(name, "probabilistic")(logits, positions, drafted, inputs))
    strict_texts = strictly(logits, positions, drafted, inputs)
    draft = drafted.probs_BKV, drafted.tokens_BK, drafted.num_drafts_B
    by_probs = texts(module.verify(logits, *draft, torch.ones(ROWS), inputs.keys_B2, positions))
    assert strict_texts != by_probs
    free = inputs.free_B.tolist()
    assert found == [
        own if is_free else other for own, other, is_free in zip(by_probs, strict_texts, free, strict=True)
    ]
