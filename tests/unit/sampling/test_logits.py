"""Processing of logits, compared with reference loops."""

import torch

from tests.support.reference import sampling as reference
from vllm_gaudi_spec.sampling import logits as edit
from vllm_gaudi_spec.sampling.logit_edits import EditTables

VOCAB = 40


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def kept(logits: torch.Tensor) -> set[int]:
    return set(torch.isfinite(logits).nonzero().flatten().tolist())


def test_penalties_count_drafts_before_position() -> None:
    """Row: prompt 3 4 4, output 5 3, drafts 5 9. Query q counts everything up to its own position."""
    history = torch.zeros(2, 12, dtype=torch.int32)
    history[0, :7] = torch.tensor([3, 4, 4, 5, 3, 5, 9])
    logits = random_logits(2, 3)
    positions = torch.tensor([[4, 5, 6], [0, 1, 2]], dtype=torch.int32)
    result = edit.apply_penalties(
        logits.clone(),
        history,
        torch.tensor([3, 1], dtype=torch.int32),
        positions,
        edit.Penalties(torch.tensor([0.4, 0.0]), torch.tensor([0.3, 0.0]), torch.tensor([1.7, 1.0])),
    )
    for q, output in enumerate(([5, 3], [5, 3, 5], [5, 3, 5, 9])):
        expected = reference.penalize(logits[0, q].tolist(), [3, 4, 4], output, 0.4, 0.3, 1.7)
        assert torch.allclose(result[0, q], torch.tensor(expected), atol=1e-5)
    assert torch.allclose(result[1], logits[1]), "neutral penalties change nothing"


def test_bitmask_masks_forbidden_tokens() -> None:
    logits = random_logits(1, 2)
    mask = torch.full((1, 2, 2), -1, dtype=torch.int32)
    mask[0, 1, 0] = 0b101
    mask[0, 1, 1] = 1 << 7  # token 39
    result = edit.apply_bitmask(logits.clone(), mask)
    assert torch.equal(result[0, 0], logits[0, 0])
    assert kept(result[0, 1]) == {0, 2, 39}


def test_logit_edits_bias_forbid_and_expire() -> None:
    """Token 7 +2 always; token 8 masked after (5, 6); token 9 masked until there are two outputs."""
    tables = EditTables(
        edits_B2N=torch.tensor([[[7, 8, 9, 0], [1000, 1000, 2, 0]]], dtype=torch.int32),
        bias_BN=torch.tensor([[2.0, -torch.inf, -torch.inf, 0.0]]),
        prefix_B3P=torch.tensor([[[5, 6, -1], [1, 0, 0], [1, 1, 0]]], dtype=torch.int32),
    )
    recent = torch.tensor([[[-2, 5, 5], [5, 6, 6]]], dtype=torch.int32)
    logits = random_logits(1, 2)
    result = edit.apply_logit_edits(logits.clone(), tables, recent, torch.tensor([[1, 2]]))
    assert torch.allclose(result[0, :, 7], logits[0, :, 7] + 2)
    assert result[0, 0, 8] == logits[0, 0, 8]
    assert result[0, 1, 8] == -torch.inf
    assert result[0, 0, 9] == -torch.inf
    assert result[0, 1, 9] == logits[0, 1, 9]
    untouched = [t for t in range(VOCAB) if t not in (7, 8, 9)]
    assert torch.equal(result[..., untouched], logits[..., untouched])


def test_stop_token_stays_if_grammar_allows_nothing_else() -> None:
    """Token 9 is masked until there are three outputs. At the first position the grammar allows only token 9."""
    logits = random_logits(1, 2)
    logits[0, 0, torch.arange(VOCAB) != 9] = -torch.inf

    def edited(until: int) -> torch.Tensor:
        tables = EditTables(
            edits_B2N=torch.tensor([[[9], [until]]], dtype=torch.int32),
            bias_BN=torch.tensor([[-torch.inf]]),
            prefix_B3P=torch.tensor([[[-1], [0], [0]]], dtype=torch.int32),
        )
        recent = torch.full((1, 2, 1), 5, dtype=torch.int32)
        return edit.apply_logit_edits(logits, tables, recent, torch.tensor([[1, 2]]))

    assert kept(edited(-3)[0, 0]) == {9}
    assert kept(edited(-3)[0, 1]) == set(range(VOCAB)) - {9}
    assert not kept(edited(3)[0, 0]), "without a grammar it is not looked at"


def test_penalties_of_listed_positions_equal_those_of_rows() -> None:
    rows, queries, vocab, length = 3, 4, 12, 20
    generator = torch.Generator().manual_seed(0)
    logits_BQV = torch.randn(rows, queries, vocab, generator=generator)
    history_BM = torch.randint(vocab, (rows, length), generator=generator, dtype=torch.int32)
    prompt_len_B, first_B = torch.tensor([5, 9, 3]), torch.tensor([4, 12, 7], dtype=torch.int32)
    positions_BQ = first_B[:, None] + torch.arange(queries, dtype=torch.int32)
    penalties = edit.Penalties(
        torch.tensor([0.5, 0.0, 0.9]), torch.tensor([0.3, 0.2, 0.0]), torch.tensor([1.3, 1.0, 0.8])
    )
    expected = edit.apply_penalties(logits_BQV, history_BM, prompt_len_B, positions_BQ, penalties)
    row_N, query_N = index_2N = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 0], [0, 1, 2, 3, 0, 0, 1, 3, 0]])
    found = edit.apply_penalties_at(
        logits_BQV[row_N, query_N],
        index_2N,
        history_BM,
        prompt_len_B,
        positions_BQ,
        edit.Penalties(*(values_B[row_N] for values_B in penalties)),
    )
    assert torch.equal(found, expected[row_N, query_N])
