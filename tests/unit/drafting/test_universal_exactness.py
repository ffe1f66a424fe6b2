"""Exactness with another vocabulary: output follows the target's distribution although tokens differ.

The drafter reads and drafts through MappedVocabulary, has only some of the target's tokens, and others of its own. Its
drafts follow the distribution that the rules are given, and the rules are exact for every distribution
(tests/unit/sampling/test_exact_rules.py).
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.support import distributions
from tests.support.distributions import ALPHA, FIRST, Table, Texts, random_table, request_keys, write
from tests.unit.sampling.test_exact_rules import RULES
from vllm_gaudi_spec.drafting.universal.vocab_map import VocabMap
from vllm_gaudi_spec.drafting.vocabulary import MappedVocabulary
from vllm_gaudi_spec.sampling.drafts import draft
from vllm_gaudi_spec.sampling.rules import strict
from vllm_gaudi_spec.sampling.rules.registry import TORCH

VOCAB = 100
DRAFTERS_OWN = 30
"""Number of tokens that only the drafter has."""
DRAWS = 60_000
BINS = 100  # of similar mass, for too many cells to test one by one

# Share of the target's tokens that the drafter also has.
every_share = pytest.mark.parametrize("share", [0.01, 0.5, 1.0], ids="{:.0%}".format)


@dataclass(frozen=True)
class Pair:
    target: Table
    seen: Table
    """Return the drafter's logits in the target's ids, by the target's context."""
    drafter: Table
    partners: dict[int, int]
    """Map the target's ids to the drafter's."""
    matched_V: np.ndarray
    """Return which of the target's tokens may be drafted."""


def pair(vocab: int, share: float, order: int = 1, seed: int = 0, drafter_is_target: bool = False) -> Pair:
    """Return two random models over shuffled vocabularies; of a few common tokens one may not be drafted."""
    rng = np.random.default_rng(seed)
    count = max(1, round(share * vocab))
    target_ids, draft_ids = rng.permutation(vocab)[:count], rng.permutation(count + DRAFTERS_OWN)[:count]
    draftable = np.ones(count, dtype=bool)
    draftable[1:2] = share == 1.0
    pairs = np.stack([target_ids, draft_ids], axis=1).astype(np.int32)
    vocabularies = VocabMap.from_pairs(pairs, draftable, vocab, count + DRAFTERS_OWN)
    translation = MappedVocabulary(
        vocabularies.target_to_draft, vocabularies.draftable, int(draft_ids[0]), torch.device("cpu")
    )

    target, drafter = random_table(vocab, order, seed), random_table(count + DRAFTERS_OWN, order, 100 + seed)
    written = torch.from_numpy(np.stack(np.unravel_index(np.arange(vocab**order), (vocab,) * order), axis=1)).int()
    read = np.zeros(vocab**order, dtype=np.int64)
    for token in translation.to_drafter(written).numpy().T:
        read = drafter.after(read, token)
    logits_CU = drafter.logits_CV[read]
    if drafter_is_target:
        logits_CU[:, draft_ids] = target.logits_CV[:, target_ids]
    matched_V = np.zeros(vocab, dtype=bool)
    matched_V[target_ids[draftable]] = True
    partners = dict(zip(target_ids.tolist(), draft_ids.tolist(), strict=True))
    made = Pair(target, Table(translation.to_target(logits_CU)), drafter, partners, matched_V)
    if share < 1:
        assert (target.probs_CV[:, ~matched_V].sum(1) > 0.02).all(), "hardly anything stands outside the intersection"
    return made


@every_share
def test_draft_distribution_is_restricted_to_common_tokens(share: float) -> None:
    """Restricted and normalized; tokens without a partner are read as the stand-in."""
    made = pair(VOCAB, share)
    expected, stand_in = np.zeros((VOCAB, VOCAB)), next(iter(made.partners.values()))
    for context in range(VOCAB):
        probs = made.drafter.probs_CV[made.partners.get(context, stand_in)]
        for target_id in np.flatnonzero(made.matched_V):
            expected[context, target_id] = probs[made.partners[target_id]]
    np.testing.assert_allclose(made.seen.probs_CV, expected / expected.sum(1, keepdims=True), atol=1e-6)


def forbid(made: Pair, contexts: slice) -> Pair:
    """Mask all tokens that the drafter has, after these contexts."""
    target, seen = (Table(table.logits_CV.clone()) for table in (made.target, made.seen))
    for table in (target, seen):
        table.logits_CV[contexts, torch.from_numpy(made.matched_V)] = -torch.inf
    return replace(made, target=target, seen=seen)


@pytest.mark.parametrize(
    ("rule", "contexts"),
    [("standard", slice(None)), ("block", slice(None)), ("standard", slice(0, None, 2)), ("block", slice(0, None, 2))],
    ids=["standard-all", "block-all", "standard-half", "block-half"],
)
def test_output_is_exact_if_all_draft_tokens_are_masked(rule: str, contexts: slice) -> None:
    """After all contexts, or only after some, so that usable drafts precede and follow."""
    made = forbid(pair(VOCAB, 0.5), contexts)
    assert torch.isinf(made.seen.logits_CV[0]).all()
    texts, _ = write(RULES[rule].verify, made.target, made.seen, num_positions=2, steps=2, length=2, rows=DRAWS, seed=5)
    p_values = distributions.p_values(texts, made.target, BINS)
    assert min(p_values) > ALPHA, p_values


def write_coupled(made: Pair, num_positions: int, length: int, rows: int) -> tuple[Texts, list[np.ndarray]]:
    """Return texts with coupled drafts under the strict rule, and the accepted drafts of each step and row."""
    texts, keys_N2, steps = Texts.empty(rows, length), request_keys(0, rows), []
    temperature_N = torch.ones(rows)
    while (texts.length_N < length).any():
        starts_N = torch.from_numpy(texts.length_N + FIRST).int()
        positions_NQ = starts_N[:, None] + torch.arange(num_positions + 1, dtype=torch.int32)
        context, drafts, logits = texts.context_N, torch.zeros(rows, 0, dtype=torch.int32), []
        for offset in range(num_positions):
            logits.append(made.target.logits_CV[context])
            positions_N = positions_NQ[:, offset]
            drafted = draft(
                TORCH, made.seen.logits_CV[context], "coupled", temperature_N, keys_N2, positions_N, starts_N
            )
            drafts = torch.cat((drafts, drafted.tokens_B[:, None]), dim=1)
            context = made.target.after(context, drafted.tokens_B.numpy())
        logits.append(made.target.logits_CV[context])
        own_NQ = strict.sample_random(torch.stack(logits, 1), temperature_N, keys_N2, positions_NQ)
        verification = strict.verify(own_NQ, drafts, torch.full((rows,), num_positions, dtype=torch.int32))
        steps.append(verification.num_sampled_B.numpy() - 1)
        tokens_NQ = verification.tokens_BQ.numpy().astype(np.int64)
        for offset in range(num_positions + 1):
            texts.append(made.target, tokens_NQ[:, offset], offset <= steps[-1])
    return texts, steps


@every_share
@pytest.mark.parametrize("num_positions", [1, 3])
def test_coupled_drafts_do_not_change_target_tokens(share: float, num_positions: int) -> None:
    """A drafter equal to the target is right exactly where the target's token is common.

    Both use the noise of the target's ids.
    """
    for drafter_is_target in (False, True):
        made = pair(VOCAB, share, drafter_is_target=drafter_is_target)
        texts, steps = write_coupled(made, num_positions, length=12, rows=500)
        plain, _ = write_coupled(made, 0, length=12, rows=500)
        assert (texts.tokens_NL == plain.tokens_NL).all()
        if drafter_is_target:
            in_common = made.matched_V[plain.tokens_NL[:, :num_positions]]
            assert (steps[0] == in_common.cumprod(1).sum(1)).all()
            assert sum(accepted_N.sum() for accepted_N in steps) > 0
