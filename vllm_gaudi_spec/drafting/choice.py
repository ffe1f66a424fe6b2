"""Choice of draft tokens from a drafter's logits, and storage for the distributions from which they were sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from vllm_gaudi_spec.drafting.memory import count_distributions
from vllm_gaudi_spec.records import Drafted, DraftRequest
from vllm_gaudi_spec.sampling.drafts import Mode, draft, draft_greedy
from vllm_gaudi_spec.sampling.verify import apply_temperature_and_filters

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import Blocks
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.records import Drafts, Hidden, Request
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.sampling.branches import Branch
    from vllm_gaudi_spec.sampling.params import Sampling

Choose = Callable[[torch.Tensor, int], Drafted]


class DraftChoice:
    def __init__(self, speculation: Speculation, requests: Requests, sampling: Sampling) -> None:
        self._requests = requests
        self._rules = requests.backend.rules
        self._sampling = sampling
        self._mode = cast(Mode, speculation.drafting)
        self._keeps_probs = speculation.keeps_probs

    def choose_branch(self, requests: list[Request]) -> Branch:
        """Return the sampling branch for drafting, given the requests that finished a step."""
        return self._sampling.branch(requests, ()).select_drafting(self._mode)

    def list_branches(self) -> set[Branch]:
        """Return all sampling branches that drafting may use."""
        return {branch.select_drafting(self._mode) for branch in self._sampling.branches}

    def _make_chooser(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, branch: Branch) -> Choose:
        """Return a function that chooses draft tokens from logits over the target's vocabulary.

        The second argument of the function is the number of draft tokens chosen so far, which `lengths_B` excludes.
        """
        inputs = None if self._mode == "greedy" else self._sampling.gather(rows_B, branch)
        # Compute these values once for all drafts: many small operations take as long as a layer of a small model.
        newest_B = lengths_B - 1

        def choose(logits_BV: torch.Tensor, before: int) -> Drafted:
            if inputs is None or self._mode == "greedy":
                return draft_greedy(self._rules, logits_BV)
            logits_BV = logits_BV.float()
            sound_B = self._rules.are_sound(logits_BV)
            if branch.random:
                logits_BV = apply_temperature_and_filters(self._rules, logits_BV[:, None], inputs, branch).squeeze(1)
            temperature_B, keys_B2 = inputs.floats["temperature"], inputs.keys_B2
            positions_B = newest_B + before if before else newest_B
            drafted = draft(self._rules, logits_BV, self._mode, temperature_B, keys_B2, positions_B, newest_B)
            return drafted._replace(probs_BV=drafted.probs_BV if self._keeps_probs else None, sound_B=sound_B)

        return choose

    def make_request(
        self,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
        max_drafts_B: torch.Tensor,
        blocks: Blocks,
        branch: Branch,
        num_drafts: int,
        hidden: Hidden | None = None,
    ) -> DraftRequest:
        """Create the request for a proposer to draft `num_drafts` tokens."""
        return DraftRequest(
            rows_B=rows_B,
            history_RM=self._requests.history_RM,
            lengths_B=lengths_B,
            max_drafts_B=max_drafts_B,
            num_drafts=num_drafts,
            blocks=blocks,
            row_operations=self._requests.backend.row_operations,
            choose=self._make_chooser(rows_B, lengths_B, branch),
            hidden=hidden,
        )


class DraftProbs:
    """Distributions of draft tokens that await verification, by row. Empty if the rule does not need them."""

    def __init__(self, speculation: Speculation, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._pad_row = max_rows
        self._num_drafts = speculation.num_drafts
        self._probs_NV: torch.Tensor | None = None
        if speculation.keeps_probs:  # flat, so that fewer distributions are copied if there are fewer than k drafts
            self._probs_NV = torch.zeros(count_distributions(speculation, max_rows), vocab_size, device=device)

    def put(self, rows_B: torch.Tensor, drafts: Drafts) -> None:
        if self._probs_NV is not None:
            assert drafts.probs_BKV is not None
            # Rows with a drafter fault keep their previous, unused distributions, so that no rule reads a faulty one.
            written_B = torch.where(drafts.num_drafts_B < 0, self._pad_row, rows_B)
            probs_BJV = drafts.probs_BKV
            self._probs_NV.index_copy_(0, self._index(written_B, probs_BJV.shape[1]), probs_BJV.flatten(0, 1))

    def gather(self, rows_B: torch.Tensor, num_drafts: int) -> torch.Tensor | None:
        """Return the distributions of each row's first `num_drafts` drafts, float32 [B, J, V], or None if not kept."""
        if self._probs_NV is None:
            return None
        return self._probs_NV.index_select(0, self._index(rows_B, num_drafts)).unflatten(0, (-1, num_drafts))

    def _index(self, rows_B: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Return the indices of the distributions of each row's first `num_drafts` drafts, int64 [B * J]."""
        offsets_J = torch.arange(num_drafts, dtype=torch.int32, device=rows_B.device)
        return (rows_B.int()[:, None] * self._num_drafts + offsets_J).flatten().long()
