"""How a drafter samples, and the noise that drafting and acceptance rules use."""

import numpy as np
import pytest
import torch

from tests.support.distributions import random_table, request_keys
from tests.support.reference.rules import race
from tests.unit.sampling.test_noise import reference_mix
from vllm_gaudi_spec.sampling.drafts import SampledMode, draft
from vllm_gaudi_spec.sampling.noise import Stream, derive_block_keys, fold_seed, gumbel, uniform
from vllm_gaudi_spec.sampling.rules.registry import TORCH
from vllm_gaudi_spec.sampling.rules.strict import sample_random

ROWS, VOCAB = 200, 40
MASK = 0xFFFFFFFF


def inputs(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits with forbidden tokens, temperatures, keys, positions and starts."""
    logits = random_table(VOCAB, 1, seed=1).logits_CV.repeat(-(-rows // VOCAB), 1)[:rows]
    logits[::2, ::3] = -torch.inf
    starts = torch.arange(rows, dtype=torch.int32) * 3 % 101
    return logits, torch.ones(rows), request_keys(0, rows), starts + 2, starts


@pytest.mark.parametrize("mode", ["probabilistic", "coupled"])
def test_temperature_0_takes_argmax_in_every_mode(mode: SampledMode) -> None:
    logits, temperature, *rest = inputs()
    temperature[::2] = 0
    drafted = draft(TORCH, logits, mode, temperature, *rest)
    best = logits.argmax(-1)
    assert torch.equal(drafted.tokens_B[::2], best[::2].int())
    assert not torch.equal(drafted.tokens_B[1::2], best[1::2].int())
    if drafted.probs_BV is not None:
        assert torch.equal(drafted.probs_BV[::2], torch.nn.functional.one_hot(best[::2], VOCAB).float())
        torch.testing.assert_close(drafted.probs_BV[1::2], logits[1::2].softmax(-1))


def test_probabilistic_equals_reference_loop() -> None:
    logits, temperature, keys, positions, starts = inputs()
    drafted = draft(TORCH, logits, "probabilistic", temperature, keys, positions, starts)
    noise = gumbel(derive_block_keys(keys, starts), positions[:, None], Stream.DRAFT, torch.arange(VOCAB).int())[:, 0]
    for row in range(ROWS):
        expected = race(logits[row].double().softmax(-1).tolist(), noise[row].tolist())
        assert drafted.tokens_B[row] == expected


def test_coupled_equals_target_sampling() -> None:
    """Equal logits give the same token at every position, in whatever step."""
    logits, temperature, keys, positions, starts = inputs()
    drafted = draft(TORCH, logits, "coupled", temperature, keys, positions, starts)
    own = sample_random(logits[:, None], temperature, keys, positions[:, None])[:, 0]
    assert drafted.probs_BV is None
    assert torch.equal(drafted.tokens_B, own)
    assert torch.equal(draft(TORCH, logits, "coupled", temperature, keys, positions, starts + 1).tokens_B, own)


@pytest.mark.parametrize("mode", ["probabilistic", "coupled"])
def test_drafts_do_not_depend_on_batch(mode: SampledMode) -> None:
    logits, *rest = inputs(50)
    together = draft(TORCH, logits, mode, *rest)
    for row in range(50):
        alone = draft(TORCH, logits[row : row + 1].clone(), mode, *(value[row : row + 1].clone() for value in rest))
        assert torch.equal(alone.tokens_B[0], together.tokens_B[row])
        if alone.probs_BV is not None and together.probs_BV is not None:
            assert torch.equal(alone.probs_BV[0], together.probs_BV[row])


def reference_block_key(seed: int, start: int) -> list[int]:
    low, high = (word & MASK for word in fold_seed(seed))
    low = reference_mix(low ^ reference_mix((start * 0xC2B2AE3D) & MASK))
    return [low, reference_mix((high + low) & MASK)]


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1])
def test_block_keys_equal_unbounded_arithmetic(seed: int) -> None:
    starts = torch.tensor([0, 1, 77, 131071], dtype=torch.int32)
    keys = torch.tensor([fold_seed(seed)] * 4, dtype=torch.int32)
    result = derive_block_keys(keys, starts).numpy().view(np.uint32).tolist()
    assert result == [reference_block_key(seed, start) for start in starts.tolist()]


def test_uniform_stays_below_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for hashed, least, below in ((-1, 1 - 2**-23, 1.0), (0, 0.0, 2**-24)):
        every_bit = torch.full((1, 1, 1), hashed, dtype=torch.int32)
        monkeypatch.setattr("vllm_gaudi_spec.sampling.noise.bits", lambda *_, result=every_bit: result)
        value = uniform(request_keys(0, 1), torch.zeros(1, 1, dtype=torch.int32), Stream.ACCEPT).item()
        assert least <= value < below
