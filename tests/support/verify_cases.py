"""Random inputs of the acceptance rules that cover what a rule must handle, and loops that verify them."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from tests.support.distributions import request_keys
from tests.support.reference.rules import Noise
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.noise import Stream, derive_block_keys, gumbel, uniform

Loop = Callable[..., list[int]]


@dataclass
class Case:
    logits_BQV: torch.Tensor
    draft_probs_BKV: torch.Tensor
    drafts_BK: torch.Tensor
    num_drafts_B: torch.Tensor
    temperature_B: torch.Tensor
    keys_B2: torch.Tensor
    positions_BQ: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name).clone() for field in fields(self)}

    def row(self, row: int) -> dict[str, torch.Tensor]:
        return {name: value[row : row + 1].clone() for name, value in self.tensors().items()}


def random_case(rows: int, num_positions: int, vocab: int = 6, seed: int = 0, masked: float = 0.2) -> Case:
    """Return ragged rows with tokens that are masked in the target or drafter. A tenth of the drafts is not the
    drafter's."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, num_positions, vocab)
    draft_logits = torch.randn(shape, generator=generator) * 1.5
    logits = torch.randn(rows, num_positions + 1, vocab, generator=generator) * 1.5
    logits[:, :num_positions] += draft_logits
    for values in (draft_logits, logits):
        values[torch.rand(values.shape, generator=generator).lt(masked) & (values < values.amax(-1, True))] = -torch.inf
    probs = draft_logits.softmax(-1)
    drafts = probs.flatten(0, 1).multinomial(1, generator=generator).view(rows, num_positions)
    strange = torch.randint(-1, vocab + 2, drafts.shape, generator=generator)
    drafts = torch.where(torch.rand(drafts.shape, generator=generator) < 0.1, strange, drafts)
    starts = torch.randint(0, 1000, (rows, 1), generator=generator)
    return Case(
        logits_BQV=logits,
        draft_probs_BKV=probs,
        drafts_BK=drafts.int(),
        num_drafts_B=torch.randint(0, num_positions + 1, (rows,), generator=generator).int(),
        temperature_B=torch.ones(rows),
        keys_B2=request_keys(seed * 100_000, rows),
        positions_BQ=(starts + torch.arange(num_positions + 1)).int(),
    )


def loop_noise(case: Case, row: int, keyed_by_start: bool) -> Noise:
    one = case.row(row)
    keys, positions = one["keys_B2"], one["positions_BQ"]
    vocab = torch.arange(case.logits_BQV.shape[-1], dtype=torch.int32)
    own = derive_block_keys(keys, positions[:, 0]) if keyed_by_start else keys
    return Noise(
        accept=uniform(own, positions, Stream.ACCEPT)[0].tolist(),
        residual=gumbel(own, positions, Stream.RESIDUAL, vocab)[0].tolist(),
        target=gumbel(keys, positions, Stream.TARGET, vocab)[0].tolist(),
    )


def loop_tokens(loop: Loop, case: Case, row: int, keyed_by_start: bool) -> list[int]:
    target = case.logits_BQV[row].double().softmax(-1).tolist()
    drafts = case.drafts_BK[row, : case.num_drafts_B[row]].tolist()
    noise = loop_noise(case, row, keyed_by_start)
    return loop(target, case.draft_probs_BKV[row].double().tolist(), drafts, noise)


def counted(verification: Verification, row: int = 0) -> list[int]:
    """Return the tokens of a row that count."""
    return verification.tokens_BQ[row, : verification.num_sampled_B[row]].tolist()
