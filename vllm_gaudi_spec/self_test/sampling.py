"""Checks of sampling: filters must keep the same tokens as a sort, and frequencies must match probabilities."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.sampling import noise
from vllm_gaudi_spec.self_test.subject import Failed, Subject, random

_VOCAB = 3000
"""The vocabulary size. It is large enough that the filters have to sort several blocks."""
_FILTERS = (
    # min-p, top-k, top-p
    (0.0, _VOCAB, 0.9),
    (0.0, _VOCAB, 0.3),
    (0.0, 50, torch.inf),
    (0.01, _VOCAB, torch.inf),
    (0.002, 400, 0.95),
    (0.0, _VOCAB, torch.inf),
)
_FEW, _ROWS, _POSITIONS = 40, 64, 128
_SIGMAS = 5.0
"""The maximum deviation of a frequency from its probability, in standard deviations."""


def check_sampling(subject: Subject) -> str:
    return f"{_check_filters(subject)}; {_check_samples(subject)}"


def _check_filters(subject: Subject) -> str:
    logits_NV, filters = make_filter_inputs()

    def self_test_filter(logits_BQV: torch.Tensor, *filters: torch.Tensor) -> tuple[torch.Tensor]:
        return (subject.backend.rules.filter_logits(logits_BQV, *filters),)

    (filtered,) = subject.compute(self_test_filter, logits_NV[:, None], *filters)
    expected_NV = keep_by_sort(logits_NV, *filters)
    for row, (kept_V, is_expected_V) in enumerate(zip(filtered.squeeze(1) > -torch.inf, expected_NV, strict=True)):
        if not torch.equal(kept_V, is_expected_V):
            min_p, top_k, top_p = _FILTERS[row]
            raise Failed(
                f"filters (min-p {min_p:g}, top-k {top_k}, top-p {top_p:g}) kept {int(kept_V.sum())} of {_VOCAB} "
                f"tokens instead of {int(is_expected_V.sum())}, {int((kept_V & ~is_expected_V).sum())} of them wrong"
            )
    if not torch.equal(filtered.squeeze(1)[expected_NV], logits_NV[expected_NV]):
        raise Failed("filters changed logits that they kept")
    return f"{len(_FILTERS)} combinations of filters kept the tokens that a sort keeps"


def make_filter_inputs() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return logits [N, V], and the min-p, top-k and top-p values of each row. In every second row, many logits are
    equal."""
    logits_NV = random((len(_FILTERS), _VOCAB), seed=20) * 3
    logits_NV[::2] = logits_NV[::2].bfloat16().float()
    min_p, top_k, top_p = zip(*_FILTERS, strict=True)
    return logits_NV, (torch.tensor(min_p), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p))


def keep_by_sort(
    logits_NV: torch.Tensor, min_p_N: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor
) -> torch.Tensor:
    """Return the tokens that the filters should keep, bool [N, V], computed with a float64 sort."""
    ordered_NV = logits_NV.double().sort(dim=-1, descending=True).values
    floor_N1 = ordered_NV[:, :1] + min_p_N.double().log()[:, None]
    floor_N1 = torch.maximum(floor_N1, ordered_NV.gather(1, top_k_N.long()[:, None] - 1))
    weights_NV = (ordered_NV - ordered_NV[:, :1]).exp() * (ordered_NV >= floor_N1)
    reached_NV = weights_NV.cumsum(-1) / weights_NV.sum(-1, keepdim=True)
    last_N1 = (reached_NV < top_p_N[:, None]).sum(-1, keepdim=True).clamp(max=logits_NV.shape[1] - 1)
    return logits_NV >= torch.maximum(floor_N1, ordered_NV.gather(1, last_N1))


def _check_samples(subject: Subject) -> str:
    rules = subject.backend.rules
    logits_V = random((_FEW,), seed=21) * 2
    filters = torch.tensor([0.0]), torch.tensor([20], dtype=torch.int32), torch.tensor([0.9])
    keys_B2 = torch.tensor([noise.fold_seed(seed) for seed in range(_ROWS)], dtype=torch.int32)
    positions_BQ = torch.arange(_POSITIONS, dtype=torch.int32).expand(_ROWS, -1).contiguous()

    def self_test_sample(
        logits_BQV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, *sampling: torch.Tensor
    ) -> tuple[torch.Tensor]:
        filtered_BQV = rules.filter_logits(logits_BQV, None, top_k_B, top_p_B)
        return (rules.sample_random(filtered_BQV, *sampling),)

    (sampled_BQ,) = subject.compute(
        self_test_sample,
        logits_V.expand(_ROWS, _POSITIONS, -1).contiguous(),
        *(values.expand(_ROWS).contiguous() for values in (*filters[1:], torch.ones(1))),
        keys_B2,
        positions_BQ,
    )
    kept_V = keep_by_sort(logits_V[None], *filters)[0]
    probs_V = logits_V.double().masked_fill(~kept_V, -torch.inf).softmax(-1)
    counts_V = torch.bincount(sampled_BQ.flatten().long(), minlength=_FEW)
    expected_V = probs_V * sampled_BQ.numel()
    sigmas_V = (counts_V - expected_V).abs() / (expected_V * (1 - probs_V)).sqrt().clamp(min=1e-6)
    worst = int(sigmas_V.argmax())
    if not sigmas_V[worst] <= _SIGMAS:
        raise Failed(
            f"a token of probability {probs_V[worst].item():.4f} was sampled {int(counts_V[worst])} times in "
            f"{sampled_BQ.numel()} instead of {expected_V[worst].item():.0f}"
        )
    return f"{sampled_BQ.numel():,} samples are at most {sigmas_V[worst].item():.1f} standard deviations off"
