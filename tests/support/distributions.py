"""Small language models given as tables, the distribution of their texts, and tests of samples against it.

The next token of a table depends on the last `order` tokens. C: contexts. V: tokens. L: length of a text. N: rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.drafts import draft
from vllm_gaudi_spec.sampling.noise import fold_seed
from vllm_gaudi_spec.sampling.rules.registry import TORCH

# All p-values of one whole run of the suite, about 300 of them, together reject a correct sampler once in 1000 runs.
# Each of them is compared with this.
ALPHA = 1e-3 / 300
# Cells that expect fewer are pooled: below this the chi-square distribution is a poor approximation.
MIN_EXPECTED = 10
# The position of the first query: neither 0 nor anything the tests rely on.
FIRST = 7

Rule = Callable[..., Verification]


@dataclass(frozen=True)
class Table:
    logits_CV: torch.Tensor
    """float32, after temperature and filters. Context 0 is the beginning of a text."""

    @property
    def vocab(self) -> int:
        return self.logits_CV.shape[1]

    @property
    def probs_CV(self) -> np.ndarray:
        return self.logits_CV.double().softmax(-1).numpy()

    def after(self, context: np.ndarray, token: np.ndarray) -> np.ndarray:
        return (context * self.vocab + token) % self.logits_CV.shape[0]


def random_table(vocab: int, order: int, seed: int, scale: float = 1.5) -> Table:
    generator = torch.Generator().manual_seed(seed)
    return Table(torch.randn(vocab**order, vocab, generator=generator) * scale)


def request_keys(first: int, count: int) -> torch.Tensor:
    return torch.tensor([fold_seed(seed) for seed in range(first, first + count)], dtype=torch.int32)


def text_probs(table: Table, length: int, contexts: np.ndarray | None = None) -> np.ndarray:
    """Return the probabilities of the next `length` tokens after each context.

    The index of a text, [N, V ** L], is the number that its tokens spell in base V.
    """
    contexts = np.zeros(1, dtype=np.int64) if contexts is None else contexts
    probs, now = np.ones((len(contexts), 1)), contexts[:, None]
    for _ in range(length):
        probs = (probs[..., None] * table.probs_CV[now]).reshape(len(contexts), -1)
        now = table.after(now[..., None], np.arange(table.vocab)).reshape(len(contexts), -1)
    return probs


def cells(tokens_NL: np.ndarray, vocab: int) -> np.ndarray:
    cell = np.zeros(len(tokens_NL), dtype=np.int64)
    for token in tokens_NL.T:
        cell = cell * vocab + token
    return cell


@dataclass
class Texts:
    tokens_NL: np.ndarray
    length_N: np.ndarray
    context_N: np.ndarray

    @classmethod
    def empty(cls, rows: int, length: int) -> Texts:
        return cls(np.zeros((rows, length), dtype=np.int64), np.zeros(rows, dtype=np.int64), np.zeros(rows, np.int64))

    def append(self, table: Table, tokens_N: np.ndarray, which_N: np.ndarray) -> None:
        """Append tokens, and drop those beyond the length under test."""
        fits = which_N & (self.length_N < self.tokens_NL.shape[1])
        self.tokens_NL[fits, self.length_N[fits]] = tokens_N[fits]
        self.length_N[which_N] += 1
        self.context_N[which_N] = table.after(self.context_N, tokens_N)[which_N]


def step(
    rule: Rule,
    target: Table,
    drafter: Table,
    texts: Texts,
    keys_N2: torch.Tensor,
    num_positions: int,
    num_drafts_N: np.ndarray | Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Draft and verify once, as a runner would, and return the number of accepted drafts.

    `num_drafts_N` may be a function of the drafts, as no runner should have it.
    """
    starts_N = first_positions(texts)
    temperature_N = torch.ones(len(starts_N))
    context, drafts, draft_probs = texts.context_N, [], []
    for offset in range(num_positions):
        drafted = draft(
            TORCH,
            drafter.logits_CV[context],
            "probabilistic",
            temperature_N,
            keys_N2,
            starts_N + offset,
            starts_N,
        )
        drafts.append(drafted.tokens_B)
        draft_probs.append(drafted.probs_BV)
        context = target.after(context, drafted.tokens_B.numpy())
    drafts_NK = torch.stack(drafts, 1)
    if callable(num_drafts_N):
        num_drafts_N = num_drafts_N(drafts_NK.numpy())
    return verify(rule, target, texts, keys_N2, drafts_NK, torch.stack(draft_probs, 1), num_drafts_N)


def first_positions(texts: Texts) -> torch.Tensor:
    """Return the position of the first query of each text's next step."""
    return torch.from_numpy(texts.length_N + FIRST).int()


def verify(
    rule: Rule,
    target: Table,
    texts: Texts,
    keys_N2: torch.Tensor,
    drafts_NK: torch.Tensor,
    draft_probs_NKV: torch.Tensor,
    num_drafts_N: np.ndarray,
) -> np.ndarray:
    """Append what a rule makes of drafts, and return the number of accepted ones."""
    num_positions = drafts_NK.shape[1]
    context, logits = texts.context_N, []
    for offset in range(num_positions):
        logits.append(target.logits_CV[context])
        context = target.after(context, drafts_NK[:, offset].numpy())
    logits.append(target.logits_CV[context])
    verification = rule(
        torch.stack(logits, 1),
        draft_probs_NKV,
        drafts_NK,
        torch.from_numpy(num_drafts_N).int(),
        torch.ones(len(drafts_NK)),
        keys_N2,
        first_positions(texts)[:, None] + torch.arange(num_positions + 1, dtype=torch.int32),
    )
    tokens, num = verification.tokens_BQ.numpy().astype(np.int64), verification.num_sampled_B.numpy()
    for offset in range(num_positions + 1):
        texts.append(target, tokens[:, offset], offset < num)
    return num - 1


def finish(target: Table, texts: Texts, rng: np.random.Generator) -> np.ndarray:
    """Complete texts that stopped early by ordinary sampling. A rule is exact if the target's distribution results."""
    cumulative = target.probs_CV.cumsum(1)
    cumulative[:, -1] = 1
    while (short := texts.length_N < texts.tokens_NL.shape[1]).any():
        drawn = rng.random((len(short), 1))
        texts.append(target, (drawn >= cumulative[texts.context_N]).sum(1), short)
    return texts.tokens_NL


def write(
    rule: Rule,
    target: Table,
    drafter: Table,
    *,
    num_positions: int,
    steps: int,
    length: int,
    rows: int,
    seed: int = 0,
    ragged: bool = False,
    chunk: int = 50_000,
) -> tuple[np.ndarray, float]:
    """Return texts [rows, length] of `steps` steps each, and the mean number of accepted drafts.

    With `ragged` the number of drafts varies from row to row and from step to step.
    """
    written, accepted = [], 0
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        rng = np.random.default_rng((seed, first))
        texts, keys = Texts.empty(count, length), request_keys(seed * rows + first, count)
        for _ in range(steps):
            num = rng.integers(0, num_positions + 1, count) if ragged else np.full(count, num_positions)
            accepted += step(rule, target, drafter, texts, keys, num_positions, num).sum()
        written.append(finish(target, texts, rng))
    return np.concatenate(written), accepted / rows / steps


def pool(probs: np.ndarray, total: int, max_bins: int | None = None) -> np.ndarray:
    """Return a bin for every cell. Rare cells are pooled, and there are at most `max_bins` bins of similar mass."""
    order = np.argsort(-probs, kind="stable")
    if max_bins is None:
        expected = probs[order] * total
        rare = int((expected < MIN_EXPECTED).sum())
        # The pool itself must not be rare.
        while 0 < rare < len(probs) and expected[len(probs) - rare :].sum() < MIN_EXPECTED:
            rare += 1
        ranks = np.minimum(np.arange(len(probs)), max(len(probs) - rare, 0))
    else:
        before = np.cumsum(probs[order]) - probs[order]
        ranks = np.minimum((before / probs.sum() * max_bins).astype(np.int64), max_bins - 1)
    bins = np.empty(len(probs), dtype=np.int64)
    bins[order] = ranks
    return bins


def binned(values: np.ndarray, bins: np.ndarray) -> np.ndarray:
    return np.bincount(bins, weights=values, minlength=bins.max() + 1)


def p_value(sampled: np.ndarray, probs: np.ndarray, max_bins: int | None = None) -> float:
    """Return the chi-square p-value of sampled cells under `probs`, 0 if an impossible cell was sampled."""
    counts = np.bincount(sampled, minlength=len(probs))
    if counts[probs <= 0].any():
        return 0.0
    bins = pool(probs, counts.sum(), max_bins)
    expected, observed = binned(probs, bins) * counts.sum(), binned(counts, bins)
    possible = expected > 0
    if possible.sum() < 2:
        return 1.0
    return float(stats.chisquare(observed[possible], expected[possible] * (counts.sum() / expected.sum())).pvalue)


def power(biased: np.ndarray, probs: np.ndarray, total: int, max_bins: int | None = None) -> float:
    """Return the probability that `p_value` < ALPHA for `total` draws from `biased`, by a noncentral chi-square."""
    bins = pool(probs, total, max_bins)
    expected, shifted = binned(probs, bins), binned(biased, bins)
    possible = expected > 0
    noncentrality = total * ((shifted - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    return float(stats.ncx2.sf(stats.chi2.isf(ALPHA, freedom), freedom, noncentrality))


def p_values(texts_NL: np.ndarray, target: Table, max_bins: int | None = None) -> list[float]:
    """Test whole texts against their joint distribution, and first tokens alone, whose fewer cells show a bias
    better."""
    lengths = sorted({length for length in (1, 2, texts_NL.shape[1]) if length <= texts_NL.shape[1]})
    return [
        p_value(cells(texts_NL[:, :length], target.vocab), text_probs(target, length)[0], max_bins)
        for length in lengths
    ]
