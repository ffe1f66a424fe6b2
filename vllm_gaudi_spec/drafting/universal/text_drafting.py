"""A drafter that is a model and reads the target's text in its own tokens, behind a step's one read.

The host keeps every row's text in the drafter's tokens. What the drafter has not read of it, a first call of a round
takes, if it is little; a longer rest, as a prompt's, is read before in the shapes of prompt chunks. So it makes no
difference why a row lags: it is new, it came back, its prefix was cached or it did not draft for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.attention.inputs import rectangle
from vllm_gaudi_spec.drafting.draft_model import NUM_NEWEST
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.drafting.universal.retokenized import RetokenizedProposer, Unread
from vllm_gaudi_spec.drafting.universal.timeline import Timeline
from vllm_gaudi_spec.records import FAULTY, PREFILL, Drafts

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Blocks
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.drafting.choice import DraftChoice, DraftLaws
    from vllm_gaudi_spec.drafting.followed import Drafter, Followed
    from vllm_gaudi_spec.drafting.load import Draft
    from vllm_gaudi_spec.drafting.universal.coverage import Coverage
    from vllm_gaudi_spec.drafting.universal.rewriting import Rewriter
    from vllm_gaudi_spec.drafting.universal.slab import Slab
    from vllm_gaudi_spec.drafting.universal.timeline import Reader
    from vllm_gaudi_spec.records import Batch, DraftRound, Request, SampleBatch, StepResult
    from vllm_gaudi_spec.runner.graphs import StepRecorder
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes
    from vllm_gaudi_spec.sampling.params import Branch, Sampling, SamplingInputs


# By so many tokens a text may shrink when its end is encoded again.
_SLACK = 64


class _Sampled(NamedTuple):
    """What the device knows of the rows that the step sampled."""

    batch: SampleBatch
    lengths_B: torch.Tensor
    inputs: SamplingInputs


class TextDrafting:
    def __init__(
        self,
        proposer: RetokenizedProposer,
        reader: Reader,
        rewriter: Rewriter | None,
        slab: Slab,
        followed: Followed,
        requests: Requests,
        recorder: StepRecorder,
        shapes: Shapes,
        choice: DraftChoice,
        laws: DraftLaws,
        num_drafts: int,
        guard: Guard,
        coverage: Coverage | None = None,
    ) -> None:
        """`shapes`: for rows as long as the slab. With a `rewriter` drafts are the drafter's own tokens, to be written
        anew in the target's."""
        self._guard = guard
        self._proposer = proposer
        self._reader = reader
        self._rewriter = rewriter
        self._slab = slab
        self._followed = followed
        self._requests = requests
        self._recorder = recorder
        self._shapes = shapes
        self._choice = choice
        self._laws = laws
        self._num_drafts = num_drafts
        self._coverage = coverage
        self._widths = (NUM_NEWEST, NUM_NEWEST + num_drafts)
        self._timelines: dict[int, Timeline] = {}
        """By row."""
        self._num_followed: dict[int, int] = {}
        """By row: how many of the target's tokens its timeline holds."""
        self._outgrown: dict[int, str] = {}
        """By row, until it samples again: requests that got no drafts because of the drafter's own length."""
        self._sampled: _Sampled | None = None
        self._drafts: dict[str, list[int]] = {}
        """Where the host knows them; else places for them, of which only the number counts."""
        self._unread_drafts: Drafts | None = None
        self._read_rows = requests.backend.graph(self._read)
        self._draft_rows = requests.backend.graph(self._draft_behind)

    @property
    def _backend(self) -> DeviceBackend:
        return self._requests.backend

    # --- what the runner tells ---

    def apply(self, requests: Requests) -> None:
        self._followed.apply()
        for row in requests.freed_rows:
            self._timelines.pop(row, None)
            self._num_followed.pop(row, None)
            self._outgrown.pop(row, None)
        for request in requests.admitted:
            self._followed.admit(request)
            self._timelines[request.row] = Timeline(self._reader)
            self._num_followed[request.row] = 0
            if self._coverage is not None:
                self._coverage.saw(request.prompt)

    def hear(self, again: list[Request], never: list[Request], *, is_off: bool) -> None:
        self._start_anew(again)
        for request in never:
            self._followed.exclude(request.row)

    def _start_anew(self, requests: list[Request]) -> None:
        """As if the drafter had read nothing of them. Rows that it gave up stay so."""
        for request in requests:
            if request.row in self._timelines:
                self._timelines[request.row] = Timeline(self._reader)
                self._num_followed[request.row] = 0

    def take_rounds(self) -> list[DraftRound]:
        return self._guard.take()

    def outgrown(self) -> Collection[str]:
        return tuple(self._outgrown.values())  # as they are now: proposing changes them

    def most(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        return np.array(num_scheduled)

    def follow(self, batch: Batch) -> None:
        """It reads behind the step; here the shapes are warmed up."""
        if batch.requests or batch.shape.phase != PREFILL:
            return
        for shape in self._shapes.prefills():
            if (shape.rows, shape.queries) == (batch.shape.rows, batch.shape.queries):
                self._read_chunks([], shape.rows, shape.queries, shape.context)

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        return self._laws.of(rows_B)

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """The host's timelines know what was accepted."""

    def propose(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, most: int) -> Drafts | None:
        self._sampled = _Sampled(batch, lengths_B, inputs)
        return None

    def drafts_of(self, step: StepResult) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        if self._unread_drafts is not None and any(request.params.structured_outputs for request in step.requests):
            # A grammar looks at the drafts before they are verified.
            tokens = self._backend.download(self._unread_drafts.tokens_BK).tolist()
            for name, row in zip(names, tokens, strict=False):
                self._drafts[name] = row[: len(self._drafts.get(name, ()))]
        return DraftTokenIds(names, [self._drafts.get(name, []) for name in names])

    # --- behind a step ---

    def propose_behind(self, step: StepResult, most: int) -> None:
        self._drafts, self._unread_drafts = {}, None
        for request in step.requests:
            self._outgrown.pop(request.row, None)
        if self._sampled is None or step.verification is None:
            return
        new = self._followed.append(step)
        try:
            self._draft_for(step, new, most)
        except Exception as error:
            self._guard.caught(error, step.requests)
            self._start_anew(step.requests)
            self._drafts, self._unread_drafts = {}, None
        self._sampled = None

    def _draft_for(self, step: StepResult, new: list[list[int]], most: int) -> None:
        for request, tokens in zip(step.requests, new, strict=True):
            if (timeline := self._timelines.get(request.row)) is not None:
                timeline.verified(tokens[:-1])
        drafters = [
            able for drafter in self._followed.drafters(step, new, most) if (able := self._able(drafter)) is not None
        ]
        if not drafters:
            return
        self._catch_up([drafter.request.row for drafter in drafters])
        unread = max(self._num_unread(drafter.request.row) for drafter in drafters)
        longest = max(len(self._timelines[drafter.request.row]) for drafter in drafters)
        # Padding reaches behind the longest row, as do its drafts.
        context = self._shapes.fit_context(longest + self._widths[-1])
        drafts = self._draft(drafters, next(width for width in self._widths if width >= unread), context)
        if self._rewriter is None:
            self._put(drafters, drafts)
        else:
            self._put_rewritten(step, drafters, drafts)

    def _able(self, drafter: Drafter) -> Drafter | None:
        """The drafter's own limit, in its own tokens."""
        row = drafter.request.row
        timeline = self._timelines.get(row)
        if timeline is None:
            self._outgrown[row] = drafter.request.req_id
            return None
        news_np = self._followed.tokens_np(row, self._num_followed[row])
        timeline.extend(news_np.tolist())
        self._num_followed[row] += len(news_np)
        if len(timeline) > self._slab.length + _SLACK:
            del self._timelines[row]  # it never comes back
            self._outgrown[row] = drafter.request.req_id
            return None
        if not timeline.is_complete or not len(timeline):
            return None
        if self._rewriter is not None and timeline.open_text is None:
            return None
        num_wanted = min(drafter.num_wanted, self._slab.length - len(timeline))
        if num_wanted <= 0:
            self._outgrown[row] = drafter.request.req_id
            return None
        return replace(drafter, num_wanted=num_wanted)

    def _num_unread(self, row: int) -> int:
        """The last token is read in any case: what stands behind it is wanted."""
        timeline = self._timelines[row]
        return max(len(timeline) - timeline.num_read, 1)

    def _catch_up(self, rows: list[int]) -> None:
        """Until a round can read the rest."""
        most = self._widths[-1]
        while behind := sorted(
            (row for row in rows if self._num_unread(row) > most), key=self._num_unread, reverse=True
        ):
            queries = min(self._num_unread(behind[0]) - 1, self._shapes.prefill_queries[-1])
            group = behind[: self._shapes.prefill_rows_at(queries)]
            counts = [min(self._num_unread(row) - 1, queries) for row in group]
            end = max(self._timelines[row].num_read for row in group) + max(counts)
            shape = self._shapes.prefill(len(group), max(counts), end)
            self._read_chunks(list(zip(group, counts, strict=True)), shape.rows, shape.queries, shape.context)

    def _read_chunks(self, members: list[tuple[int, int]], num_rows: int, width: int, context: int) -> None:
        """Rows and how many tokens each is to read."""
        self._recorder.saw(("read", num_rows, width, context))
        rows_np = self._padded([row for row, _ in members], num_rows)
        unread = self._upload_unread([(place, *member) for place, member in enumerate(members)], num_rows, width)
        ends = [self._timelines[row].num_read + count for row, count in members]
        self._read_rows(unread, self._slab.blocks(rows_np, ends, context))
        for row, count in members:
            self._timelines[row].read(self._timelines[row].num_read + count)

    def _draft(self, drafters: list[Drafter], width: int, context: int) -> Drafts:
        assert self._sampled is not None
        batch, lengths_B, inputs = self._sampled
        num_rows, rows = len(batch.rows_np), [drafter.request.row for drafter in drafters]
        self._recorder.saw(self._signature(num_rows, width, context, self._choice.branch(inputs)))
        members = [(drafter.place, row, self._num_unread(row)) for drafter, row in zip(drafters, rows, strict=True)]
        wanted_np, ends = np.zeros(num_rows, dtype=np.int32), [0] * num_rows
        for drafter in drafters:
            wanted_np[drafter.place] = drafter.num_wanted
            ends[drafter.place] = len(self._timelines[drafter.request.row]) + drafter.num_wanted
        drafts = self._draft_rows(
            batch.rows_B,
            lengths_B,
            self._backend.upload(torch.from_numpy(wanted_np)),
            self._upload_unread(members, num_rows, width),
            self._slab.blocks(batch.rows_np, ends, context),
            inputs.for_drafting(self._choice.branch(inputs)),
        )
        for row in rows:
            self._timelines[row].read(len(self._timelines[row]))
        return drafts

    def _upload_unread(self, members: list[tuple[int, int, int]], num_rows: int, width: int) -> torch.Tensor:
        """int32 [B, N + 2] of places in the batch, rows, and how many tokens each: what `_unread` cuts up."""
        small = np.zeros((num_rows, width + 2), dtype=np.int32)
        for place, row, count in members:
            timeline = self._timelines[row]
            begin = min(timeline.num_read, len(timeline) - count)
            small[place, :count] = timeline.tokens(begin, begin + count)
            small[place, width:] = begin, count
        return self._backend.upload(torch.from_numpy(small))

    def _padded(self, rows: list[int], num_rows: int) -> np.ndarray:
        rows_np = np.full(num_rows, self._requests.pad_row, dtype=np.int64)
        rows_np[: len(rows)] = rows
        return rows_np

    # --- what runs on the device ---

    def _read(self, unread: torch.Tensor, blocks: Blocks) -> None:
        cut = _unread(unread)
        self._proposer.read(rectangle(cut.tokens_BN, cut.starts_B, cut.num_real_B, blocks))

    def _draft_behind(
        self,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
        wanted_B: torch.Tensor,
        unread: torch.Tensor,
        blocks: Blocks,
        inputs: SamplingInputs,
    ) -> Drafts:
        request = self._choice.request(self._requests, rows_B, lengths_B, wanted_B, blocks, inputs)
        said = self._proposer.propose(request, _unread(unread))
        if self._rewriter is None:
            drafts = self._guard.usable(said, request, self._laws.vocab_size)
            self._laws.put(rows_B, drafts)
            self._requests.put_drafts(rows_B, lengths_B, drafts)
            return drafts.known
        # Of the drafter's own tokens the host reads nothing else: a row with a fault says so in their place.
        drafts = self._guard.usable(said, request, None)
        tokens_BK = torch.where((drafts.num_drafts_B < 0)[:, None], FAULTY, drafts.tokens_BK)
        return Drafts(tokens_BK, drafts.num_drafts_B)

    # --- where drafts go ---

    def _put(self, drafters: list[Drafter], drafts: Drafts) -> None:
        self._unread_drafts = drafts
        for drafter in drafters:
            self._timelines[drafter.request.row].drafted(drafter.num_wanted)
            self._drafts[drafter.request.req_id] = [0] * drafter.num_wanted

    def _put_rewritten(self, step: StepResult, drafters: list[Drafter], drafts: Drafts) -> None:
        assert self._rewriter is not None
        said = self._backend.download(drafts.tokens_BK).tolist()
        faulty = [drafter.request.req_id for drafter in drafters if FAULTY in said[drafter.place]]
        self._guard.done(faulty, len(drafters))
        for drafter in drafters:
            if drafter.request.req_id in faulty:
                continue
            timeline = self._timelines[drafter.request.row]
            own = said[drafter.place][: drafter.num_wanted]
            known = timeline.open_text
            assert known is not None
            timeline.drafted(len(own), own)
            if rewritten := self._rewriter.rewrite(own, known)[: drafter.num_wanted]:
                self._drafts[drafter.request.req_id] = rewritten
        self._followed.put(step, self._drafts)

    def in_use(self) -> dict[str, int]:
        return {"slab_rows": len(self._timelines)}

    # --- what can happen ---

    def _signature(self, num_rows: int, width: int, context: int, branch: Branch) -> Hashable:
        return ("draft", num_rows, width, context, branch)

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        """Rounds of drafts, and what is read before them."""
        shapes, branches = self._shapes, self._choice.branches(sampling)
        for num_rows, width, context, branch in product(shapes.decode_rows, self._widths, shapes.contexts, branches):
            yield self._signature(num_rows, width, context, branch)
        for shape in shapes.prefills():
            yield ("read", shape.rows, shape.queries, shape.context)

    def rounds(self, sampling: Sampling) -> Iterator[tuple[int, Branch, Draft]]:
        shapes, branches = self._shapes, sorted(self._choice.branches(sampling))
        for num_rows, width, context, branch in product(shapes.decode_rows, self._widths, shapes.contexts, branches):
            yield num_rows, branch, partial(self._draft_padding, width=width, context=context)

    def _draft_padding(
        self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, width: int, context: int
    ) -> None:
        self._sampled = _Sampled(batch, lengths_B, inputs)
        self._draft([], width, context)
        self._sampled = None

    def no_drafts(self, num_rows: int) -> Drafts | None:
        return None

    def warm_up(self) -> None:
        if self._rewriter is not None:
            self._followed.warm_up()


def _unread(uploaded: torch.Tensor) -> Unread:
    width = uploaded.shape[1] - 2
    return Unread(uploaded[:, :width], uploaded[:, width], uploaded[:, width + 1])
