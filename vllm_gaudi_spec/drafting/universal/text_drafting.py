"""Drafting with a model that reads the target's text as drafter tokens, at positions independent of the target's.

The host stores each row's text as drafter tokens, so drafting runs after the step's device-to-host sync. If a row has
few unread tokens, the first forward pass in drafting reads them. If a row has many, such as a whole prompt, they are
read before drafting, in the same shapes as prompt chunks. It does not matter why a row has unread tokens: it may be
new or resumed, have a cached prefix, or have had no drafts for a while. The proposer runs on the device with static
shapes.

N is the number of tokens that each row reads in a forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.attention.metadata import build_rectangle
from vllm_gaudi_spec.drafting.base import Drafting
from vllm_gaudi_spec.drafting.choice import DraftChoice, DraftProbs
from vllm_gaudi_spec.drafting.draft_model import NUM_NEWEST, draft_chain
from vllm_gaudi_spec.drafting.history import RequestHistory
from vllm_gaudi_spec.drafting.universal.timeline import Timeline
from vllm_gaudi_spec.graphs import DRAFTERS_READS, DRAFTS, Job
from vllm_gaudi_spec.records import FAULTY, Drafts, Hidden
from vllm_gaudi_spec.sampling.branches import Branch
from vllm_gaudi_spec.scheduling.limits import RowLimits
from vllm_gaudi_spec.step_inputs import StepInputs

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import Inputs
    from vllm_gaudi_spec.drafting.base import DraftingContext, Model
    from vllm_gaudi_spec.drafting.guard import Guard
    from vllm_gaudi_spec.drafting.history import DraftingRow
    from vllm_gaudi_spec.drafting.memory import DrafterKVRegion
    from vllm_gaudi_spec.drafting.universal.timeline import Reader, Rewriter
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import DraftRequest, DraftRound, Request, StepResult
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.step_inputs import RowInputs


# Maximum number of tokens that a text may lose when its end is encoded again.
_SLACK = 64


@dataclass(frozen=True, slots=True)
class Unread:
    """Tokens that the drafter must read before drafting. Rows that do not draft have no such tokens."""

    tokens_BN: torch.Tensor
    """int32, in the drafter's vocabulary."""
    starts_B: torch.Tensor
    """int32: position of the first token in the drafter's own numbering."""
    num_real_B: torch.Tensor
    """int32: number of unread tokens."""


class RetokenizedProposer:
    def __init__(self, model: Model, translation: Translation) -> None:
        self._model = model
        self._translation = translation

    def read(self, chunk: Inputs) -> None:
        """Write the KV for tokens of a text that is too long to be read while drafting."""
        self._model.forward(chunk)

    def propose(self, request: DraftRequest, unread: Unread) -> Drafts:
        rows, width = unread.tokens_BN.shape
        # Rows without unread tokens use position 0 and write to the pad block.
        starts_B = torch.where(unread.num_real_B > 0, unread.starts_B, 0)
        hidden = self._model.forward(
            build_rectangle(unread.tokens_BN, starts_B, unread.num_real_B, request.blocks, request.row_operations)
        )
        row_B = torch.arange(rows, dtype=torch.int32, device=unread.starts_B.device)
        last_BH = hidden.last.index_select(0, row_B * width + (unread.num_real_B - 1).clamp(min=0))
        ends_B = unread.starts_B + unread.num_real_B
        return draft_chain(self._model, self._translation, request, Hidden(last_BH), ends_B)


class TextDrafting(Drafting):
    verifies_drafts = True

    def __init__(
        self,
        context: DraftingContext,
        *,
        proposer: RetokenizedProposer,
        reader: Reader,
        rewriter: Rewriter | None,
        kv_region: DrafterKVRegion,
        guard: Guard,
    ) -> None:
        """
        Args:
            context: Drafting context whose shapes cover the maximum row length in the KV region.
            rewriter: Converts drafts from the drafter's own tokens to the target's.
        """
        speculation, requests = context.speculation, context.requests
        row_limits = RowLimits(context.max_rows, speculation, context.max_model_len)
        self._guard = guard
        self._proposer = proposer
        self._reader = reader
        self._rewriter = rewriter
        self._kv_region = kv_region
        self._history = RequestHistory(row_limits, requests, speculation.num_drafts)
        self._requests = requests
        self._recorder = context.recorder
        self._shapes = context.shapes
        self._choice = DraftChoice(speculation, requests, context.sampling)
        self._draft_probs = DraftProbs(speculation, context.max_rows, context.vocab_size, context.device)
        self._num_drafts = speculation.num_drafts
        self._widths = (NUM_NEWEST, NUM_NEWEST + speculation.num_drafts)
        self._timelines: dict[int, Timeline] = {}
        """Maps rows to timelines."""
        self._num_followed: dict[int, int] = {}
        """Maps rows to the number of target tokens included in the timeline."""
        self._outgrown: dict[int, str] = {}
        """Maps rows to requests without drafts because of the drafter's maximum length, until the rows sample again."""
        self._drafts: dict[str, list[int]] = {}
        """Maps requests to draft tokens, or to the same number of zeros if the tokens are on the device."""
        self._unread_drafts: Drafts | None = None
        self._read_rows = requests.backend.graphs.graph(self._read_on_device)
        self._draft_rows = requests.backend.graphs.graph(self._draft_on_device)

    # --- the scheduler ---

    def apply(self, requests: Requests) -> None:
        for row in requests.freed_rows:
            self._timelines.pop(row, None)
            self._num_followed.pop(row, None)
            self._outgrown.pop(row, None)
        for request in requests.admitted:
            self._history.admit(request)
            self._timelines[request.row] = Timeline(self._reader)
            self._num_followed[request.row] = 0

    def update_drafter_state(self, restarted: list[Request], excluded: list[Request], *, disabled: bool) -> None:
        self._reset_rows(restarted)
        for request in excluded:
            self._history.exclude(request.row)

    def _reset_rows(self, requests: list[Request]) -> None:
        """Reset the timelines for these requests. Rows without a timeline are skipped."""
        for request in requests:
            if request.row in self._timelines:
                self._timelines[request.row] = Timeline(self._reader)
                self._num_followed[request.row] = 0

    def take_rounds(self) -> list[DraftRound]:
        return self._guard.take_rounds()

    def find_outgrown_requests(self) -> Collection[str]:
        return tuple(self._outgrown.values())  # a copy, because `propose_on_host` modifies it

    def gather_probs(self, rows_B: torch.Tensor, num_drafts: int) -> torch.Tensor | None:
        return self._draft_probs.gather(rows_B, num_drafts)

    def host_drafts(self, requests: list[Request]) -> np.ndarray | None:
        return None if self._rewriter is None else self._history.get_drafts(requests)

    def get_draft_token_ids(self, step: StepResult) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        if self._unread_drafts is not None and any(request.params.structured_outputs for request in step.requests):
            # The scheduler checks drafts against the grammar before verification.
            tokens = self._requests.backend.memory.download(self._unread_drafts.tokens_BK).tolist()
            for name, row in zip(names, tokens, strict=False):
                self._drafts[name] = row[: len(self._drafts.get(name, ()))]
        return DraftTokenIds(names, [self._drafts.get(name, []) for name in names])

    # --- after a step ---

    def propose_on_host(self, step: StepResult, max_drafts: int) -> None:
        self._drafts, self._unread_drafts = {}, None
        for request in step.requests:
            self._outgrown.pop(request.row, None)
        if step.verification is None:
            return
        new = self._history.append(step)
        try:
            self._draft_step(step, new, max_drafts)
        except Exception as error:
            self._guard.handle_error(error, step.requests)
            self._reset_rows(step.requests)
            self._drafts, self._unread_drafts = {}, None

    def _draft_step(self, step: StepResult, new: list[list[int]], max_drafts: int) -> None:
        for request, tokens in zip(step.requests, new, strict=True):
            if (timeline := self._timelines.get(request.row)) is not None:
                timeline.verified(tokens[:-1])
        found = map(self._apply_own_limit, self._history.select_drafting_rows(step, new, max_drafts))
        members = [member for member in found if member is not None]
        if not members:
            return
        self._catch_up([member.request.row for member in members])
        unread = max(self._count_unread(member.request.row) for member in members)
        longest = max(len(self._timelines[member.request.row]) for member in members)
        # Padding and drafts may extend past the end of the longest row.
        context = self._shapes.fit_context(longest + self._widths[-1])
        width = next(width for width in self._widths if width >= unread)
        num_rows, branch = self._shapes.fit_rows(len(step.requests)), self._choice.choose_branch(step.requests)
        drafts = self._draft(step.requests, members, num_rows, width, context, branch)
        if self._rewriter is None:
            self._store_drafts(members, drafts)
        else:
            self._store_rewritten_drafts(step, members, drafts)

    def _apply_own_limit(self, member: DraftingRow) -> DraftingRow | None:
        """Apply the drafter's limit, counted in its own tokens. Returns None for a row that cannot draft."""
        row = member.request.row
        timeline = self._timelines.get(row)
        if timeline is None:
            self._outgrown[row] = member.request.req_id
            return None
        new_np = self._history.get_tokens(row, self._num_followed[row])
        timeline.extend(new_np.tolist())
        self._num_followed[row] += len(new_np)
        if len(timeline) > self._kv_region.length + _SLACK:
            del self._timelines[row]  # this row never drafts again
            self._outgrown[row] = member.request.req_id
            return None
        if not timeline.is_complete or not len(timeline):
            return None
        if self._rewriter is not None and timeline.open_text is None:
            return None
        max_drafts = min(member.max_drafts, self._kv_region.length - len(timeline))
        if max_drafts <= 0:
            self._outgrown[row] = member.request.req_id
            return None
        return replace(member, max_drafts=max_drafts)

    def _count_unread(self, row: int) -> int:
        """Return the number of unread tokens, at least 1 because the last token's logits are always needed."""
        timeline = self._timelines[row]
        return max(len(timeline) - timeline.num_read, 1)

    def _catch_up(self, rows: list[int]) -> None:
        """Read tokens until drafting can read the remaining ones."""
        max_unread = self._widths[-1]
        while lagging := sorted(
            (row for row in rows if self._count_unread(row) > max_unread), key=self._count_unread, reverse=True
        ):
            queries = min(self._count_unread(lagging[0]) - 1, self._shapes.prefill_queries[-1])
            group = lagging[: self._shapes.prefill_rows_at(queries)]
            counts = [min(self._count_unread(row) - 1, queries) for row in group]
            ends = [self._timelines[row].num_read + count for row, count in zip(group, counts, strict=True)]
            shape = self._shapes.prefill(len(group), max(counts), max(ends))
            self._read_chunks(list(zip(group, counts, strict=True)), shape.rows, shape.queries, shape.context)

    def _read_chunks(self, members: list[tuple[int, int]], num_rows: int, width: int, context: int) -> None:
        """Read chunks. `members` contains the rows and the number of tokens that each of them reads."""
        self._recorder.saw(self._read_signature(num_rows, width, context))
        header_np = np.zeros((4, num_rows), dtype=np.int32)
        header_np[0] = self._requests.pad_row
        header_np[0, : len(members)] = [row for row, _ in members]
        unread_np = self._pack_unread([(index, *member) for index, member in enumerate(members)], num_rows, width)
        ends = [self._timelines[row].num_read + count for row, count in members]
        self._read_rows(self._pack(header_np, ends, context, unread_np))
        for row, count in members:
            self._timelines[row].read(self._timelines[row].num_read + count)

    def _draft(
        self,
        requests: list[Request],
        members: list[DraftingRow],
        num_rows: int,
        width: int,
        context: int,
        branch: Branch,
    ) -> Drafts:
        """Draft tokens in one batch. `members` contains the rows that may have drafts."""
        self._recorder.saw(self._signature(num_rows, width, context, branch))
        header_np, ends, unread = np.zeros((4, num_rows), dtype=np.int32), [0] * num_rows, []
        header_np[0] = self._requests.pad_rows(requests, num_rows)
        for member in members:
            row = member.request.row
            header_np[3, member.index] = member.max_drafts
            ends[member.index] = len(self._timelines[row]) + member.max_drafts
            unread.append((member.index, row, self._count_unread(row)))
        step = self._pack(header_np, ends, context, self._pack_unread(unread, num_rows, width))
        drafts = self._draft_rows(step, branch)
        for member in members:
            timeline = self._timelines[member.request.row]
            timeline.read(len(timeline))
        return drafts

    def _pack(self, header_np: np.ndarray, ends: list[int], context: int, unread_np: np.ndarray) -> StepInputs:
        blocks = self._kv_region.blocks(header_np[0], ends, context)
        return StepInputs.pack(header_np, blocks, self._requests.backend.memory.upload, unread_np)

    def _pack_unread(self, members: list[tuple[int, int, int]], num_rows: int, width: int) -> np.ndarray:
        """Pack unread tokens as int32 [B, N + 2], in the format that `_split_unread` expects.

        Args:
            members: Batch index, row and number of tokens for each member.
        """
        small = np.zeros((num_rows, width + 2), dtype=np.int32)
        for index, row, count in members:
            timeline = self._timelines[row]
            begin = min(timeline.num_read, len(timeline) - count)
            small[index, :count] = timeline.tokens(begin, begin + count)
            small[index, width:] = begin, count
        return small

    # --- device ---

    def _read_on_device(self, step: StepInputs) -> None:
        rows = step.split()
        chunk = _split_unread(rows)
        row_operations = self._requests.backend.row_operations
        self._proposer.read(
            build_rectangle(chunk.tokens_BN, chunk.starts_B, chunk.num_real_B, rows.blocks, row_operations)
        )

    def _draft_on_device(self, step: StepInputs, branch: Branch) -> Drafts:
        rows = step.split()
        rows_B = rows.rows_B
        lengths_B = self._requests.lengths(rows_B)
        request = self._choice.make_request(rows_B, lengths_B, rows.max_drafts_B, rows.blocks, branch, self._num_drafts)
        proposed = self._proposer.propose(request, _split_unread(rows))
        if self._rewriter is None:
            drafts = self._guard.check_drafts(proposed, request, self._draft_probs.vocab_size)
            self._draft_probs.put(rows_B, drafts)
            self._requests.put_drafts(rows_B, lengths_B, drafts)
            return drafts.for_host
        # The host copies tokens but not counts, so mark the tokens of a row with a fault as `FAULTY`.
        drafts = self._guard.check_drafts(proposed, request, None)
        tokens_BK = torch.where((drafts.num_drafts_B < 0)[:, None], FAULTY, drafts.tokens_BK)
        return Drafts(tokens_BK, drafts.num_drafts_B)

    # --- storing drafts ---

    def _store_drafts(self, members: list[DraftingRow], drafts: Drafts) -> None:
        self._unread_drafts = drafts
        for member in members:
            self._timelines[member.request.row].drafted(member.max_drafts)
            self._drafts[member.request.req_id] = [0] * member.max_drafts

    def _store_rewritten_drafts(self, step: StepResult, members: list[DraftingRow], drafts: Drafts) -> None:
        assert self._rewriter is not None
        tokens = self._requests.backend.memory.download(drafts.tokens_BK).tolist()
        faulty = [member.request.req_id for member in members if FAULTY in tokens[member.index]]
        self._guard.record_round(faulty, len(members))
        for member in members:
            if member.request.req_id in faulty:
                continue
            timeline = self._timelines[member.request.row]
            text, row = timeline.open_text, tokens[member.index][: member.max_drafts]
            assert text is not None
            timeline.drafted(len(row), row)
            if rewritten := self._rewriter.rewrite(row, text)[: member.max_drafts]:
                self._drafts[member.request.req_id] = rewritten
        self._history.keep_drafts(step, self._drafts)

    def in_use(self) -> dict[str, int]:
        return {"drafter_kv_rows": len(self._timelines)}

    # --- warm-up ---

    def _signature(self, num_rows: int, width: int, context: int, branch: Branch) -> Hashable:
        return ("draft", num_rows, width, context, branch)

    def _read_signature(self, num_rows: int, width: int, context: int) -> Hashable:
        return ("read", num_rows, width, context)

    def propose_for_padding(self, num_rows: int, num_drafts: int) -> None:
        if num_drafts:
            self._draft([], [], num_rows, self._widths[0], self._shapes.contexts[0], Branch())

    def jobs(self) -> Iterator[Job]:
        """Yield warm-up runs for reads and drafting. While serving, nothing is read before a step has sampled."""
        shapes, branches = self._shapes, sorted(self._choice.list_branches())
        for shape in reversed(shapes.prefills()):  # largest first, because its memory is enough for all
            sizes = shape.rows, shape.queries, shape.context
            run = partial(self._read_chunks, [], *sizes)
            yield Job(DRAFTERS_READS, run, (self._read_signature(*sizes),), shape.tokens)
        for key in product(shapes.decode_rows, self._widths, shapes.contexts, branches):
            is_common = key[-1] == Branch()
            yield Job(DRAFTS, partial(self._draft, [], [], *key), (self._signature(*key),), key[0], is_common)


def _split_unread(rows: RowInputs) -> Unread:
    assert rows.more_BX is not None
    width = rows.more_BX.shape[1] - 2
    return Unread(rows.more_BX[:, :width], rows.more_BX[:, width], rows.more_BX[:, width + 1])
