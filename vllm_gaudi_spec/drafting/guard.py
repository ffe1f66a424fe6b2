"""Keeps a drafter's faults from its requests: they go on as if nothing had been drafted, and the scheduler is informed.

Two kinds. An exception reaches the host at once. The output is checked on the device, in the graph that drafts: a row
with a fault gets `FAULTY` in place of its number of drafts, which is none, and the report of the step that would have
verified them contains it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec.records import FAULTY, DraftRound, Drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.records import DraftRequest, Request
    from vllm_gaudi_spec.upstream.distributed import GroupCoordinator

logger = init_logger(__name__)

Agree = Callable[[Mapping[str, Sequence[int]] | None], bool]
"""Whether every rank drafted the same; None: this one failed. All ranks call it, after each round."""


class Guard:
    def __init__(self, *, independent: bool, replicas: GroupCoordinator | None = None) -> None:
        """`independent`: no other rank may wait, in the middle of a drafter's collective, for one that failed.
        `replicas`: the ranks of the target, where each of them has the whole drafter."""
        self._independent = independent
        self._replicas = replicas
        self._rounds: list[DraftRound] = []
        self._num_caught = 0

    def caught(self, error: Exception, requests: Sequence[Request]) -> None:
        """A drafter on the device raised in service; raises again among several ranks, which cannot survive that.
        Warm-up does not call it: its jobs raise."""
        if not self._independent:
            raise error
        self.failed(error, requests)

    def failed(self, error: Exception, requests: Sequence[Request]) -> None:
        """Nothing was drafted for these requests, because of the drafter."""
        self._num_caught += 1
        if self._num_caught & (self._num_caught - 1) == 0:  # a drafter that fails now and then would fill the log
            logger.warning("The drafter failed, %d times so far.", self._num_caught, exc_info=error)
        self._rounds.append(DraftRound(tuple(request.req_id for request in requests), worked=False))

    def usable(self, drafts: Drafts, request: DraftRequest, vocab_size: int | None) -> Drafts:
        """On the device: `mark_unusable`, with the same result on all ranks."""
        checked = mark_unusable(drafts, request, vocab_size)
        return checked if self._replicas is None else mark_different(checked, self._replicas)

    def done(self, faulty: Sequence[str], num_requested: int) -> None:
        """A round on the host, in which drafts of some rows may have been unusable."""
        if faulty:
            logger.warning_once("The drafter returned ids that are no tokens; its drafts of that step were dropped.")
        self._rounds.append(DraftRound(tuple(faulty), worked=len(faulty) < num_requested))

    def take(self) -> list[DraftRound]:
        """The rounds of this step, merged: at most one."""
        rounds, self._rounds = self._rounds, []
        if len(rounds) < 2:
            return rounds
        faulty = dict.fromkeys(req_id for done in rounds for req_id in done.faulty)
        return [DraftRound(tuple(faulty), worked=all(done.worked for done in rounds))]


def agreement(vllm_config: VllmConfig) -> Agree:
    """For drafters on the host, each rank's own. Drafts that differ between ranks would make their steps differ."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return lambda drafts: drafts is not None

    from vllm_gaudi_spec.upstream.distributed import get_tp_group

    group = get_tp_group().cpu_group

    def agree(drafts: Mapping[str, Sequence[int]] | None) -> bool:
        mark = (
            -1
            if drafts is None
            else zlib.crc32(repr(sorted((name, list(row)) for name, row in drafts.items())).encode())
        )
        both = torch.tensor([mark, -mark], dtype=torch.int64)
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
        largest, smallest = int(both[0]), -int(both[1])
        return largest == smallest >= 0

    return agree


# --- on the device ---


def mark_unusable(drafts: Drafts, request: DraftRequest, vocab_size: int | None) -> Drafts:
    """Marks rows whose drafts cannot be used, and replaces ids that are no tokens. `vocab_size`: None where the drafts
    are in the drafter's own vocabulary, which the host checks."""
    rows, num_drafts = request.rows_B.shape[0], request.num_drafts
    if drafts.tokens_BK.shape != (rows, num_drafts) or drafts.num_drafts_B.shape != (rows,):
        raise ValueError(
            f"a drafter returned {tuple(drafts.tokens_BK.shape)} tokens and {tuple(drafts.num_drafts_B.shape)} "
            f"counts for {rows} rows of {num_drafts} drafts"
        )
    tokens_BK, num_drafts_B = request.row_operations.check_drafts(
        drafts.tokens_BK, drafts.num_drafts_B, request.max_drafts_B, drafts.sound_BK, vocab_size, mark=FAULTY
    )
    return Drafts(tokens_BK, num_drafts_B, drafts.probs_BKV)


def mark_different(drafts: Drafts, group: GroupCoordinator) -> Drafts:
    """Marks rows whose drafts differ between the ranks of `group`. A collective, of a few numbers a row.

    Ranks that have a drafter each compute its logits each, so that NaN of one rank shows on that rank only; and a step
    that verified other drafts on each rank would add up partial sums of different tokens.
    """
    num_B = drafts.num_drafts_B
    is_draft_BK = torch.arange(drafts.tokens_BK.shape[1], dtype=torch.int32, device=num_B.device) < num_B[:, None]
    parts = [num_B[:, None], torch.where(is_draft_BK, drafts.tokens_BK, 0)]
    if drafts.probs_BKV is not None:
        prob_BK = drafts.probs_BKV.gather(2, drafts.tokens_BK[:, :, None].long()).squeeze(2).float()
        parts.append(torch.where(is_draft_BK, prob_BK.view(torch.int32), 0))
    local_BN = torch.cat([part.int() for part in parts], dim=1)
    communicator = group.device_communicator
    assert communicator is not None
    # As floats, of which only the bits are moved: not every device's ranks exchange integers.
    gathered = communicator.all_gather(local_BN.view(torch.float32), 0).view(torch.int32)
    parted_B = (gathered.view(group.world_size, *local_BN.shape) != local_BN).any(2).any(0)
    return drafts._replace(num_drafts_B=torch.where(parted_B, FAULTY, num_B).int())
