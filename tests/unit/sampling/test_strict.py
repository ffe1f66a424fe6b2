"""The strict rule compared with a reference loop, for different numbers of drafts."""

from __future__ import annotations

import torch

from tests.support.reference.sampling import accept
from vllm_gaudi_spec.sampling.noise import fold_seed
from vllm_gaudi_spec.sampling.rules.strict import sample_greedy, sample_random, verify


def test_verify_equals_reference_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    for drafts in range(6):
        sampled = torch.randint(0, 2, (200, drafts + 1), generator=generator, dtype=torch.int32)
        proposed = torch.randint(-1, 2, (200, drafts), generator=generator, dtype=torch.int32)
        num = torch.randint(0, drafts + 1, (200,), generator=generator, dtype=torch.int32)
        verification = verify(sampled, proposed, num)
        for row in range(200):
            expected = accept(proposed[row, : num[row]].tolist(), sampled[row].tolist())
            assert verification.tokens_BQ[row, : verification.num_sampled_B[row]].tolist() == expected


def test_greedy_rows_in_random_batch_take_argmax() -> None:
    logits = torch.randn(4, 2, 100)
    keys = torch.tensor([fold_seed(seed) for seed in range(4)], dtype=torch.int32)
    positions = torch.zeros(4, 2, dtype=torch.int32)
    temperature = torch.tensor([0.0, 1.0, 0.0, 1.0])
    sampled = sample_random(logits, temperature, keys, positions)
    assert torch.equal(sampled[::2], sample_greedy(logits)[::2])
    assert not torch.equal(sampled[1::2], sample_greedy(logits)[1::2])
