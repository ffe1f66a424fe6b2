"""The strict rule compared with a reference loop, for different numbers of drafts."""

import torch

from tests.support.reference.sampling import accept
from vllm_gaudi_spec.sampling.rules.strict import verify


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
