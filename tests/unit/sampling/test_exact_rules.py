"""Exactness and robustness of the standard and the block rule.

Exactness is shown twice: by enumerating every draft with the functions that compute acceptance probabilities, and by
sampling with the rules and their real noise. Always for more than one step, since a rule may be exact for the first
token only.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from tests.support import distributions, exact
from tests.support.distributions import ALPHA, Table, Texts, random_table, request_keys, text_probs, write
from tests.support.reference import rules as loops
from tests.support.verify_cases import counted, loop_tokens, random_case
from vllm_gaudi_spec.sampling import stop
from vllm_gaudi_spec.sampling.rules import block, standard, strict

RULES = {"standard": standard, "block": block}
LOOPS = {"standard": loops.standard, "block": loops.block}
STOPS = {"standard": exact.standard_stops, "block": exact.block_stops}
# of summed float32 probabilities
ROUNDING = 1e-6
DRAWS = 200_000

every_rule = pytest.mark.parametrize("rule", list(RULES))


# ---- token by token -----------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("num_positions", [1, 2, 3, 5])
def test_rule_equals_reference_loop(rule: str, num_positions: int) -> None:
    case = random_case(400, num_positions, seed=num_positions)
    verification = RULES[rule].verify(**case.tensors())
    assert verification.tokens_BQ.dtype == verification.num_sampled_B.dtype == torch.int32
    for row in range(400):
        assert counted(verification, row) == loop_tokens(LOOPS[rule], case, row, keyed_by_start=rule == "block"), row
    lengths = set(verification.num_sampled_B.tolist())
    assert lengths == set(range(1, num_positions + 2)), "the case does not show every number of accepted drafts"


@every_rule
@pytest.mark.parametrize("garbage", [-1, 10**9, -(2**31)])
def test_entries_after_drafts_are_ignored(rule: str, garbage: int) -> None:
    case = random_case(200, 4)
    clean = RULES[rule].verify(**case.tensors())
    behind = torch.arange(4) >= case.num_drafts_B[:, None]
    case.drafts_BK[behind] = garbage
    case.draft_probs_BKV[behind] = torch.nan
    dirty = RULES[rule].verify(**case.tensors())
    assert torch.equal(clean.num_sampled_B, dirty.num_sampled_B)
    assert ((dirty.tokens_BQ >= 0) & (dirty.tokens_BQ < 6)).all()
    for row in range(200):
        assert counted(clean, row) == counted(dirty, row)


@every_rule
@pytest.mark.parametrize(("rows", "num_positions", "vocab"), [(60, 3, 500), (5, 1, 40_000), (5, 2, 40_000)])
def test_rows_do_not_depend_on_batch(rule: str, rows: int, num_positions: int, vocab: int) -> None:
    """Nor, for a large vocabulary, on how many threads share the work of a row."""
    case = random_case(rows, num_positions, vocab)
    case.temperature_B[::4] = 0
    together = RULES[rule].verify(**case.tensors())
    for row in range(rows):
        alone = RULES[rule].verify(**case.row(row))
        assert torch.equal(alone.tokens_BQ[0], together.tokens_BQ[row])
        assert torch.equal(alone.num_sampled_B[0], together.num_sampled_B[row])


@every_rule
def test_greedy_rows_take_argmax(rule: str) -> None:
    """Among random rows, whatever their draft probabilities."""
    case = random_case(300, 4, vocab=3, masked=0)
    case.temperature_B[::2] = 0
    case.draft_probs_BKV[::4] = 0
    verification = RULES[rule].verify(**case.tensors())
    best = strict.sample_greedy(case.logits_BQV)
    expected = strict.verify(best, case.drafts_BK, case.num_drafts_B)
    for row in range(0, 300, 2):
        assert counted(verification, row) == counted(expected, row)
    assert verification.num_sampled_B[::2].unique().tolist() == [1, 2, 3, 4, 5]


def test_empty_residual_falls_back_to_target() -> None:
    """A rejection if p = q can only be a rounding error."""
    case = random_case(100, 2, masked=0.4)
    case.draft_probs_BKV = case.logits_BQV[:, :2].softmax(-1)
    place = torch.zeros(100, dtype=torch.int32)
    token = stop.sample_next(
        case.logits_BQV,
        case.draft_probs_BKV,
        place + 2,
        place,
        torch.ones(100),
        case.temperature_B,
        case.keys_B2,
        case.keys_B2,
        case.positions_BQ,
    )
    own = strict.sample_random(case.logits_BQV, case.temperature_B, case.keys_B2, case.positions_BQ)
    assert torch.equal(token, own[:, 0])


# ---- the law, by enumeration --------------------------------------------------------------------


def model_pairs(vocab: int) -> Iterator[tuple[Table, Table]]:
    """Yield pairs of a target and a drafter: unrelated ones, close ones, and ones that forbid each other's tokens."""
    for seed in range(5):
        target, drafter = random_table(vocab, 2, seed), random_table(vocab, 2, 100 + seed)
        if seed == 1:
            target.logits_CV[::2, 0] = -torch.inf
            drafter.logits_CV[::3, 1] = -torch.inf
        elif seed == 2:
            drafter.logits_CV.copy_(target.logits_CV + 0.1 * drafter.logits_CV)
        elif seed == 3:
            target.logits_CV[:, ::2] = -torch.inf
            drafter.logits_CV[:, 1::2] = -torch.inf
        elif seed == 4:
            drafter.logits_CV[:, 1:] = -torch.inf
        yield target, drafter


@every_rule
@pytest.mark.parametrize(("vocab", "num_positions"), [(2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_two_steps_follow_joint_target_distribution(rule: str, vocab: int, num_positions: int, ragged: bool) -> None:
    rng = np.random.default_rng(0)
    for target, drafter in model_pairs(vocab):
        num_drafts = partial(rng.integers, 0 if ragged else num_positions, num_positions + 1)
        law = exact.two_step_text(STOPS[rule], target, drafter, num_positions, num_drafts)
        assert np.abs(law - text_probs(target, 2 * (num_positions + 1))[0]).sum() / 2 < ROUNDING


# ---- the law, by sampling -----------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_two_sampled_steps_follow_target_distribution(rule: str, ragged: bool) -> None:
    target, drafter = random_table(3, 2, seed=1), random_table(3, 2, seed=2)
    texts, _ = write(RULES[rule].verify, target, drafter, num_positions=2, steps=2, length=6, rows=DRAWS, ragged=ragged)
    p_values = distributions.p_values(texts, target)
    assert min(p_values) > ALPHA, p_values


def write_with_chosen_drafts(
    rule: str, target: Table, choose: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return texts of three steps. `choose` gets the accepted drafts of the previous step, and the next drafts."""
    drafter = random_table(target.vocab, 2, seed=2)
    texts, keys = Texts.empty(DRAWS, 6), request_keys(0, DRAWS)
    accepted = np.zeros(DRAWS, dtype=np.int64)
    for _ in range(3):
        number = partial(choose, accepted)
        accepted = distributions.step(RULES[rule].verify, target, drafter, texts, keys, 2, number)
    return distributions.finish(target, texts, np.random.default_rng(0))


@every_rule
def test_number_of_drafts_may_depend_on_earlier_acceptance(rule: str) -> None:
    target = random_table(3, 2, seed=1)
    texts = write_with_chosen_drafts(rule, target, lambda accepted, drafts: np.array([2, 0, 1])[accepted])
    assert min(distributions.p_values(texts, target)) > ALPHA


@every_rule
@pytest.mark.parametrize("position", [0, 1])
def test_number_of_drafts_must_not_depend_on_the_drafts_themselves(rule: str, position: int) -> None:
    """Dropping a draft because of its own token biases the target's distribution."""
    target = random_table(3, 2, seed=1)
    texts = write_with_chosen_drafts(rule, target, lambda _, drafts: np.where(drafts[:, position] == 0, position, 2))
    assert min(distributions.p_values(texts, target)) < ALPHA


# ---- what is accepted ---------------------------------------------------------------------------


def test_block_accepts_at_least_as_much_as_standard() -> None:
    """In expectation, after every context, and exactly as often as the closed forms say."""
    gains = []
    for seed in range(10):
        target, drafter = random_table(4, 1, seed), random_table(4, 1, 10 + seed)
        contexts, num = np.arange(4), np.full(4, 3)
        by_rule = {
            rule: exact.step_distribution(STOPS[rule], target, drafter, contexts, 3, num).mean_accepted
            for rule in RULES
        }
        np.testing.assert_allclose(by_rule["standard"], expected_standard(target, drafter, 3), atol=1e-5)
        np.testing.assert_allclose(by_rule["block"], expected_block(target, drafter, 3), atol=1e-5)
        assert (by_rule["block"] > by_rule["standard"] - ROUNDING).all()
        gains.append((by_rule["block"] - by_rule["standard"]).mean())
    assert max(gains) > 0.02


def expected_standard(target: Table, drafter: Table, num_positions: int) -> np.ndarray:
    """Return A_k(c) = sum over x of min(p, q)(x | c) * (1 + A_{k-1}(c x)), by context of order 1."""
    expected = np.zeros(target.vocab)
    for _ in range(num_positions):
        expected = np.minimum(target.probs_CV, drafter.probs_CV) @ (1 + expected)
    return expected


def expected_block(target: Table, drafter: Table, num_positions: int) -> np.ndarray:
    """Return the sum over i of E[p_i], where p_i = min(p_{i-1} p / q, 1) and drafts come from q."""
    p, q = target.probs_CV, drafter.probs_CV

    def below(context: int, weight: float, places: int) -> float:
        if not places:
            return 0.0
        after = [min(weight * p[context, x] / q[context, x], 1.0) for x in range(target.vocab)]
        return sum(q[context, x] * (w + below(x, w, places - 1)) for x, w in enumerate(after))

    return np.array([below(context, 1.0, num_positions) for context in range(target.vocab)])


# ---- negative controls --------------------------------------------------------------------------


def off_by(table: Table, distance: float) -> Table:
    """Return a distribution at this total variation from the table's.

    Mass moves from the most likely token to the third.
    """
    probs = table.probs_CV.copy()
    order = np.argsort(-probs[0])
    probs[:, order[0]] -= distance
    probs[:, order[2]] += distance
    return Table(torch.from_numpy(probs).log().float())


@every_rule
def test_small_bias_is_rejected(rule: str) -> None:
    """A rule that is exact for a distribution 0.01 away from the target's."""
    target, drafter = random_table(8, 0, seed=5), random_table(8, 0, seed=6)
    wrong = off_by(target, 0.01)
    assert distributions.power(wrong.probs_CV[0], target.probs_CV[0], DRAWS) > 0.99
    for seed in range(3):
        texts, _ = write(
            RULES[rule].verify, wrong, drafter, num_positions=1, steps=1, length=1, rows=DRAWS, seed=1 + seed
        )
        assert min(distributions.p_values(texts, target)) < ALPHA, seed
