"""Isolation of requests from drafter faults. Affected requests continue without drafts, and the scheduler is informed.

The host sees exceptions immediately. Draft tokens are checked on the device, in the graph that generates them. A row
with unusable drafts gets `FAULTY` as its number of drafts, which counts as 0. The step that would have verified the
drafts reports the fault.
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
"""Function that returns whether all ranks drafted the same tokens. It takes the drafts, or None if drafting failed."""


class Guard:
    def __init__(self, *, independent: bool, replicas: GroupCoordinator | None = None) -> None:
        """
        Args:
            independent: Whether a failure on this rank cannot block other ranks in one of the drafter's collectives.
            replicas: The target's ranks, if each of them runs the whole drafter.
        """
        self._independent = independent
        self._replicas = replicas
        self._rounds: list[DraftRound] = []
        self._num_caught = 0

    def handle_error(self, error: Exception, requests: Sequence[Request]) -> None:
        """Handle an exception raised by a device drafter.

        Reraises the exception if there are several ranks, which cannot recover. Warm-up raises exceptions directly.
        """
        if not self._independent:
            raise error
        self.record_failure(error, requests)

    def record_failure(self, error: Exception, requests: Sequence[Request]) -> None:
        """Record that there are no drafts for these requests because the drafter failed."""
        self._num_caught += 1
        # Log only at powers of two, because a drafter that fails often could fill the log.
        if self._num_caught & (self._num_caught - 1) == 0:
            logger.warning(
                "The drafter failed (%d failures so far); this step has no drafts.", self._num_caught, exc_info=error
            )
        self._rounds.append(DraftRound(tuple(request.req_id for request in requests), worked=False))

    def check_drafts(self, drafts: Drafts, request: DraftRequest, vocab_size: int | None) -> Drafts:
        """Mark unusable drafts on the device, with the same result on all ranks."""
        checked = mark_unusable(drafts, request, vocab_size)
        return checked if self._replicas is None else mark_different(checked, self._replicas)

    def record_round(self, faulty: Sequence[str], num_requested: int) -> None:
        """Record the result of drafting on the host. `faulty` contains the requests with unusable drafts."""
        if faulty:
            logger.warning_once("The drafter returned invalid token ids; the drafts of those requests are dropped.")
        self._rounds.append(DraftRound(tuple(faulty), worked=len(faulty) < num_requested))

    def take_rounds(self) -> list[DraftRound]:
        """Return and clear the results of drafting in this step, merged into at most one."""
        rounds, self._rounds = self._rounds, []
        if len(rounds) < 2:
            return rounds
        faulty = dict.fromkeys(req_id for done in rounds for req_id in done.faulty)
        return [DraftRound(tuple(faulty), worked=all(done.worked for done in rounds))]


def make_agreement_check(vllm_config: VllmConfig) -> Agree:
    """Return the check for agreement between ranks, for host drafters, which run independently on each rank.

    The check is necessary because ranks with different drafts would run different steps.
    """
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return lambda drafts: drafts is not None

    from vllm_gaudi_spec.upstream.distributed import get_tp_group

    group = get_tp_group().cpu_group

    def agree(drafts: Mapping[str, Sequence[int]] | None) -> bool:
        mark = -1
        if drafts is not None:
            mark = zlib.crc32(repr(sorted((name, list(row)) for name, row in drafts.items())).encode())
        both = torch.tensor([mark, -mark], dtype=torch.int64)
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
        largest, smallest = int(both[0]), -int(both[1])
        return largest == smallest >= 0

    return agree


# --- on the device ---


def mark_unusable(drafts: Drafts, request: DraftRequest, vocab_size: int | None) -> Drafts:
    """Mark rows with unusable drafts, and replace invalid token IDs.

    Args:
        vocab_size: None if the drafts are in the drafter's own vocabulary, in which case the host checks the tokens.
    """
    rows, num_drafts = request.rows_B.shape[0], request.num_drafts
    if drafts.tokens_BK.shape != (rows, num_drafts) or drafts.num_drafts_B.shape != (rows,):
        raise ValueError(
            f"A drafter returned tokens of shape {tuple(drafts.tokens_BK.shape)} and counts of shape "
            f"{tuple(drafts.num_drafts_B.shape)}; expected ({rows}, {num_drafts}) and ({rows},)."
        )
    tokens_BK, num_drafts_B = request.row_operations.check_drafts(
        drafts.tokens_BK, drafts.num_drafts_B, request.max_drafts_B, drafts.sound_BK, vocab_size, mark=FAULTY
    )
    return Drafts(tokens_BK, num_drafts_B, drafts.probs_BKV)


def mark_different(drafts: Drafts, group: GroupCoordinator) -> Drafts:
    """Mark rows whose drafts differ between the ranks in `group`, which exchange a few numbers per row.

    Ranks that each run the whole drafter compute logits independently, so NaN may appear on only one rank. If ranks
    verified different drafts, the target would add up partial sums that belong to different tokens.
    """
    num_B = drafts.num_drafts_B
    is_draft_BK = torch.arange(drafts.tokens_BK.shape[1], dtype=torch.int32, device=num_B.device) < num_B[:, None]
    parts = [num_B[:, None], torch.where(is_draft_BK, drafts.tokens_BK, 0)]
    if drafts.probs_BKV is not None:
        prob_BK = drafts.probs_BKV.gather(2, drafts.tokens_BK[:, :, None].long()).squeeze(2).float()
        # A row with NaN is already marked on its own rank, so its number of drafts differs from that on other ranks.
        parts.append(torch.where(is_draft_BK & ~prob_BK.isnan(), prob_BK, 0))
    # Exchange floats, because some devices' collectives lack integers. Token IDs below 2**24 are exact in float32.
    local_BN = torch.cat([part.float() for part in parts], dim=1)
    communicator = group.device_communicator
    assert communicator is not None
    gathered = communicator.all_gather(local_BN, 0)
    parted_B = (gathered.view(group.world_size, *local_BN.shape) != local_BN).any(2).any(0)
    return drafts._replace(num_drafts_B=torch.where(parted_B, FAULTY, num_B).int())
