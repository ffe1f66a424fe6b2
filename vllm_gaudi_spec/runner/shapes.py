"""Complete lists of shapes: every padded batch and sampling pass that a configuration can produce."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from vllm_gaudi_spec.config import Options, UnsupportedConfigError, ranks_in_step
from vllm_gaudi_spec.records import DECODE, PREFILL, SampleShape, Shape
from vllm_gaudi_spec.runner.buckets import divided_powers, geometric, refuse_waste, round_up

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.sampling.branches import Branch

logger = init_logger(__name__)


def fit(buckets: tuple[int, ...], size: int) -> int:
    """Return the smallest bucket that is at least `size`."""
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise AssertionError(f"{size} is larger than the largest bucket {buckets[-1]}")
    return buckets[index]


def fit_or_largest(buckets: tuple[int, ...], size: int, largest: int, name: str) -> int:
    """Return the bucket for `size`. If the list is too short, return `largest`."""
    if size <= buckets[-1]:
        return fit(buckets, size)
    logger.warning_once(
        "A step of size %d exceeds the largest value in %s, %d, so it is padded to %d and its graphs are compiled "
        "while serving. List this size in additional_config.gaudi_spec.%s.",
        size,
        name,
        buckets[-1],
        largest,
        name,
    )
    return fit((largest,), size)


@dataclass(frozen=True, slots=True)
class Shapes:
    decode_rows: tuple[int, ...]
    sample_rows: tuple[int, ...]
    """Numbers of rows in sampling passes, fewer than in `decode_rows` if every branch is captured."""
    decode_queries: tuple[int, ...]
    """1 for plain decodes, and 1 + j for each number j of drafts per row that a step may verify."""
    prefill_rows: tuple[int, ...]
    """Numbers of prompt chunks, each in one row, that may share a forward pass, unless chunks are split into slices."""
    prefill_queries: tuple[int, ...]
    contexts: tuple[int, ...]
    """Maximum numbers of KV tokens per row."""
    entries: tuple[int, ...]
    """Total numbers of KV blocks in a decode, for devices with a flat block list. If empty, decodes use `contexts`."""
    max_len: int
    """Maximum number of tokens in a row."""
    block_size: int
    """Number of tokens in a KV block."""
    most_rows: int
    """Maximum number of rows, which is at least `--max-num-seqs` even if a user's list of `decode_rows` is shorter."""
    longest_chunk: int
    """Maximum padded length of a chunk. It exceeds `prefill_queries` if the user's list is too short."""
    max_prefill_tokens: int
    """Maximum number of tokens, including padding, in chunks that share a forward pass. One chunk may be longer."""
    causal_first_chunks: bool = False
    """Whether the smallest context of a chunk is used only for chunks that start at position 0."""
    computes_padding: bool = False
    """Whether computing a padding token takes as long as computing a real token."""
    slice_tokens: int = 0
    """Length of the rows into which prompt chunks are split (see `slices`), or 0 if each chunk has a single row."""
    slice_rows: tuple[int, ...] = ()
    """Numbers of such rows that may share a forward pass."""
    ranges: tuple[int, ...] = ()
    """Numbers of blocks at the start of the KV cache that a decode may read in place (`Shape.in_place`)."""

    @classmethod
    def from_config(
        cls,
        vllm_config: VllmConfig,
        options: Options,
        backend: DeviceBackend,
        widths: tuple[int, ...] = (),
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        slices_chunks: bool | None = None,
        in_place: bool = False,
    ) -> Shapes:
        """Create the lists of shapes from the options.

        Args:
            widths: `Speculation.widths`, or an empty tuple without speculation.
            block_size: Size of the smallest KV blocks, if it is known.
            num_blocks: Number of the smallest KV blocks, if it is known.
            slices_chunks: Whether the model and its drafter support slices. None if sizes should cover both cases.
            in_place: Whether decodes may read KV blocks in place, because no block has two owners.
        """
        num_drafts = max(widths, default=0)
        scheduler, max_len = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        if num_drafts > backend.traits.max_drafts:
            raise UnsupportedConfigError(
                f"Device {backend.traits.name} verifies at most {backend.traits.max_drafts} drafts per step; "
                "set num_speculative_tokens in --speculative-config to that or less."
            )
        longest_chunk = min(scheduler.max_num_batched_tokens, max_len)
        traits = backend.traits
        alignment = traits.smallest_prefill
        prefill = options.prefill_buckets or divided_powers(
            alignment, longest_chunk, traits.prefill_step, traits.prefill_parts
        )
        decode = options.batch_buckets or divided_powers(1, scheduler.max_num_seqs, traits.decode_step, 8)
        powers_of_two = divided_powers(1, scheduler.max_num_seqs, 0, 1)
        refuse_waste("batch_buckets", decode, scheduler.max_num_seqs, "--max-num-seqs")
        refuse_waste("prefill_buckets", prefill, longest_chunk, "--max-num-batched-tokens")
        most_rows = max(decode[-1], scheduler.max_num_seqs)
        if longest_chunk > prefill[-1]:
            longest_chunk = round_up(longest_chunk, alignment)
        else:
            longest_chunk = prefill[-1]
        size = block_size or backend.traits.block_size
        # If steps are not captured, one longer forward pass is no faster than two, and it needs more memory.
        most_tokens = max(prefill[-1], scheduler.max_num_batched_tokens if backend.traits.captures else 0)
        slice_tokens = 0 if slices_chunks is False else backend.traits.slice_tokens
        slice_rows: tuple[int, ...] = ()
        if slice_tokens and not (options.prefill_rows or options.prefill_buckets) and _can_slice(vllm_config):
            # All chunks use this list, so it may be twice as long.
            lengths = divided_powers(slice_tokens, most_tokens, traits.prefill_step, 8)
            slice_rows = tuple(length // slice_tokens for length in lengths)
        widest_chunk = slice_tokens if slice_rows and slices_chunks else longest_chunk
        entries: tuple[int, ...] = ()
        ranges: tuple[int, ...] = ()
        if traits.flat_decode:
            max_entries = most_rows * -(-max_len // size)
            entries = _entries(options.block_buckets, max_entries, num_blocks, exclusive=in_place)
            if in_place:
                # The profile run measures the memory of the longest list.
                longest = min(num_blocks or 0, entries[-1])
                listed = options.block_buckets or geometric(_SMALLEST_RANGE, longest, 2.0)
                ranges = tuple(sorted({min(length, longest) for length in listed}))
        return cls(
            decode_rows=decode,
            sample_rows=options.batch_buckets or (powers_of_two if backend.traits.captures else decode),
            decode_queries=(1, *(1 + width for width in widths)),
            prefill_rows=(1,) if slice_rows else _choose_prefill_rows(vllm_config, options, backend),
            prefill_queries=prefill,
            contexts=_contexts(max_len, max(widest_chunk, 1 + num_drafts), backend),
            entries=entries,
            max_len=max_len,
            block_size=size,
            most_rows=most_rows,
            longest_chunk=longest_chunk,
            max_prefill_tokens=most_tokens,
            causal_first_chunks=backend.traits.causal_first_chunks,
            computes_padding=backend.traits.captures,
            slice_tokens=slice_tokens if slice_rows else 0,
            slice_rows=slice_rows,
            ranges=ranges,
        )

    def change_length(self, max_len: int, backend: DeviceBackend) -> Shapes:
        """Return shapes for the same batches, but for rows of up to `max_len` tokens and only with block tables."""
        # A step of the drafter may read one more token than a verify step.
        widest = max(self.longest_chunk, self.decode_queries[-1] + 1)
        return replace(
            self,
            contexts=_contexts(max_len, widest, backend),
            entries=(),
            ranges=(),
            max_len=max_len,
            prefill_rows=backend.traits.prefill_rows if self.slice_tokens else self.prefill_rows,
            slice_tokens=0,
            slice_rows=(),
        )

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Return the lengths to which single prompt chunks are padded."""
        return tuple(rows * self.slice_tokens for rows in self.slice_rows) or self.prefill_queries

    @property
    def max_context(self) -> int:
        return self.contexts[-1]

    def fit_rows(self, num_rows: int) -> int:
        """Return the bucket for `num_rows` rows that decode in the same step."""
        return fit_or_largest(self.decode_rows, num_rows, self.most_rows, "batch_buckets")

    def fit_sample_rows(self, num_rows: int) -> int:
        return fit_or_largest(self.sample_rows, num_rows, self.most_rows, "batch_buckets")

    def fit_queries(self, num_tokens: int) -> int:
        """Return the bucket for a prompt chunk of `num_tokens` tokens."""
        return fit_or_largest(self.prefill_queries, num_tokens, self.longest_chunk, "prefill_buckets")

    def fit_context(self, num_tokens: int) -> int:
        return fit(self.contexts, num_tokens)

    def _decode_context(self, ends: Sequence[int]) -> int:
        """Return the context of a decode that does not read KV in place."""
        if not self.entries:
            return fit(self.contexts, min(max(ends, default=0), self.max_context))
        num_entries = self._count_blocks(ends)
        largest = self.entries[-1]
        while largest < num_entries:  # requests share more KV blocks than the list allows for
            largest *= 2
        return fit_or_largest(self.entries, num_entries, largest, "block_buckets")

    def _count_blocks(self, ends: Sequence[int]) -> int:
        return sum(-(-min(end, self.max_len) // self.block_size) for end in ends)

    def decode(self, num_queries: int, ends: Sequence[int], num_rows: int = 0, *, last_block: int = 0) -> Shape:
        """Return the shape of a decode whose rows have `ends` KV tokens, including those of this step.

        Args:
            num_queries: Number of queries per row.
            ends: Number of KV tokens in each row.
            num_rows: Minimum number of rows, which may exceed the length of `ends`.
            last_block: The highest ID among the rows' KV blocks.
        """
        rows = self.fit_rows(max(len(ends), num_rows))
        if length := self._fit_range(rows, ends, last_block):
            return Shape(DECODE, rows, num_queries, length, in_place=True)
        context = self._decode_context(ends)
        if self.entries and rows > self.fit_rows(len(ends)):
            # Smaller totals are listed only with fewer rows.
            sizes = (shape.context for shape in self.plain_decodes() if shape.rows == rows and not shape.in_place)
            context = min((size for size in sizes if size >= context), default=context)
        return Shape(DECODE, rows, num_queries, context)

    def _fit_range(self, rows: int, ends: Sequence[int], last_block: int) -> int:
        """Return the number of blocks that a decode reads in place, or 0 if gathering is faster or necessary."""
        num_blocks = max(last_block, rows) + 1
        if not self.ranges or num_blocks > self.ranges[-1]:
            return 0
        length = fit(self.ranges, num_blocks)
        # Padding of a verify step may extend past the blocks of its rows.
        gathered = fit(self.entries, min(max(self._count_blocks(ends), rows), self.entries[-1]))
        return length if length <= _COST_OF_GATHERING * gathered else 0

    def prefill(self, num_rows: int, longest: int, end: int, *, start: int = 0) -> Shape:
        """Return the shape for a batch of prompt chunks.

        `end` is the maximum number of tokens in a row, and `start` is the maximum start position of a chunk. Padding
        may extend past the context.
        """
        queries = self.fit_queries(longest)
        contexts = self.prefill_contexts(queries)
        context = fit(contexts[1:] if start and self.causal_first_chunks else contexts, end)
        return Shape(PREFILL, fit(self.prefill_rows, num_rows), queries, context)

    def begins_at_start(self, shape: Shape) -> bool:
        """Whether all chunks in this shape start at position 0, provided that their `start` was passed to `prefill`."""
        if shape.phase != PREFILL or self.slice_tokens or not self.causal_first_chunks:
            return False
        return shape.context == self.prefill_contexts(shape.queries)[0]

    def prefill_slices(self, num_rows: int, end: int) -> Shape:
        """Return the shape for prompt chunks that are split into `num_rows` slices in total."""
        context = fit(self.prefill_contexts(self.slice_tokens), end)
        return Shape(PREFILL, fit(self.slice_rows, num_rows), self.slice_tokens, context)

    def prefill_contexts(self, queries: int) -> tuple[int, ...]:
        """Return the possible contexts for chunks in this bucket: first the context for a prompt's first chunk, and
        then those for later chunks."""
        if len(self.contexts) == 1 and not self.causal_first_chunks:
            return self.contexts  # the device reads only a row's own blocks, regardless of the width of block tables
        first = round_up(queries, self.block_size)
        shortest = first + self.block_size * self.causal_first_chunks
        longest = max(shortest, round_up(self.max_len, self.block_size))
        return tuple(sorted({first, *(size for size in self.contexts if first < size < longest), longest}))

    def prefill_rows_at(self, queries: int) -> int:
        """Return the number of chunks in this bucket that may share a forward pass."""
        bucket = self.fit_queries(queries)
        if bucket > self.prefill_queries[-1]:
            return 1  # captured while serving, and larger than the sizes whose memory was measured
        return max(rows for rows in self.prefill_rows if rows == 1 or rows * bucket <= self.max_prefill_tokens)

    @property
    def largest_prefill(self) -> int:
        """Number of tokens in the largest batch of prompt chunks, even if it is captured only while serving."""
        return max(self.longest_chunk, *(shape.tokens for shape in self.prefills()))

    def split_chunks(self, counts: Sequence[int]) -> list[int]:
        """Split adjacent chunks into batches so that forward passes and padding take the least time in total.

        Returns the number of chunks in each batch. `counts` contains the number of tokens in each chunk. Chunks keep
        their order, because a chunk may read the KV of earlier chunks.
        """
        sizes = self._split_slices(counts) if self.slice_tokens else self._split_rows(counts)
        parts, first = [], 0
        while first < len(counts):
            parts.append(sizes[first])
            first += sizes[first]
        return parts

    def _split_rows(self, counts: Sequence[int]) -> list[int]:
        """Return the size of the cheapest padded batch that begins with each chunk, as a number of chunks."""
        queries = [self.fit_queries(count) for count in counts]
        most_rows = [self.prefill_rows_at(count) for count in counts]
        padded_rows = [fit(self.prefill_rows, size) for size in range(self.prefill_rows[-1] + 1)]
        costs, sizes = [0] * (len(counts) + 1), [0] * len(counts)
        for first in reversed(range(len(counts))):
            longest, most, num_tokens = 0, len(counts), 0
            for size in range(1, len(counts) - first + 1):
                last = first + size - 1
                longest, most = max(longest, queries[last]), min(most, most_rows[last])
                if size > most:
                    break
                num_tokens += counts[last]
                padding = padded_rows[size] * longest - num_tokens if self.computes_padding else 0
                cost = _TOKENS_OF_A_FORWARD + padding + costs[first + size]
                if size == 1 or cost <= costs[first]:
                    costs[first], sizes[first] = cost, size
        return sizes

    def _split_slices(self, counts: Sequence[int]) -> list[int]:
        """Return the size of the cheapest batch of slices that begins with each chunk, as a number of chunks."""
        listed_np = np.array(self.slice_rows)
        total_np = np.cumsum([0, *(-(-count // self.slice_tokens) for count in counts)])
        costs_np, sizes = np.zeros(len(counts) + 1), [1] * len(counts)
        for first in reversed(range(len(counts))):
            rows_np = total_np[first + 1 :] - total_np[first]
            most = max(np.searchsorted(rows_np, listed_np[-1], side="right"), 1)
            index_np = np.minimum(np.searchsorted(listed_np, rows_np[:most]), len(listed_np) - 1)
            computed_np = listed_np[index_np] * self.slice_tokens
            every_np = _TOKENS_OF_A_FORWARD + computed_np + costs_np[first + 1 : first + 1 + most]
            costs_np[first] = every_np.min()
            sizes[first] = int(np.flatnonzero(every_np == costs_np[first])[-1]) + 1
        return sizes

    def prefills(self) -> list[Shape]:
        """Return all possible shapes for prompt chunks."""
        rectangles = [(rows, self.slice_tokens) for rows in self.slice_rows] or [
            (rows, queries)
            for queries in self.prefill_queries
            for rows in self.prefill_rows
            if rows <= self.prefill_rows_at(queries)
        ]
        return [
            Shape(PREFILL, rows, queries, context)
            for rows, queries in dict.fromkeys(rectangles)
            for context in self.prefill_contexts(queries)
        ]

    def plain_decodes(self) -> list[Shape]:
        """Return all possible shapes of decodes with one query per row."""
        if not self.entries:
            return [Shape(DECODE, rows, 1, context) for rows, context in product(self.decode_rows, self.contexts)]
        max_blocks = -(-self.max_len // self.block_size)
        gathers = [
            Shape(DECODE, rows, 1, entries)
            for fewer, rows in pairwise((0, *self.decode_rows))
            for less, entries in pairwise((0, *self.entries))
            # There are more than `fewer` rows with 1 to `max_blocks` blocks each.
            if entries > fewer and less < rows * max_blocks
        ]
        in_place = [
            Shape(DECODE, rows, 1, length, in_place=True)
            for rows, length in product(self.decode_rows, self.ranges)
            if length > rows and length <= _COST_OF_GATHERING * max(g.context for g in gathers if g.rows == rows)
        ]
        return gathers + in_place

    def all(self) -> list[Shape]:
        """Return all shapes, largest first, so that the shape that needs the most memory allocates it first."""
        decodes = (shape._replace(queries=queries) for shape in self.plain_decodes() for queries in self.decode_queries)
        return sorted([*self.prefills(), *decodes], key=lambda shape: (shape.tokens, shape.context), reverse=True)


_SMALLEST_PASS = 16
"""Minimum number of positions in a sampling pass. A smaller pass takes about as long, because most of the time is spent
reading the output layer."""
_MOST_LISTS, _MOST_RECTANGLES = 7, 5
"""Maximum numbers of position lists and of padded batches per sampling branch. If steps always verify the same number
of drafts, this allows 40 sampling graphs, or 80 if sampling passes generate drafts only in some steps."""


class SampleShapes:
    """The complete list of shapes for sampling passes.

    If each combination of shape and sampling branch is compiled, a sampling pass lists the positions to sample,
    regardless of their rows. Verifying a few rows can then share a graph with sampling many rows without drafts, and a
    row without drafts always has one position. Otherwise, or if an acceptance rule needs all positions of a row
    together, a sampling pass uses padded rows.
    """

    def __init__(self, shapes: Shapes, *, max_rows: int, lists: bool, needs_rectangle: dict[bool, bool]) -> None:
        """
        Args:
            lists: Whether sampling passes use lists of positions.
            needs_rectangle: Whether a pass needs padded rows, for greedy (False) and random (True) verification.
        """
        self._lists = lists
        self._needs_rectangle = needs_rectangle
        self._max_rows = max_rows
        self._max_queries = shapes.decode_queries[-1]
        self._queries = shapes.decode_queries
        self._rows, self._fit_rows = shapes.sample_rows, shapes.fit_sample_rows
        self._rectangles = _halve(max_rows, 1)[-_MOST_RECTANGLES:]
        self._usual = _halve(max_rows * self._max_queries, _SMALLEST_PASS)[-_MOST_LISTS:]

    def fit(self, num_queries: int, num_positions: Sequence[int], branch: Branch) -> SampleShape:
        """Return the shape for a step in which requests have `num_positions` positions each, at most `num_queries`."""
        if self._is_rectangle(num_queries, branch):
            num_rows = len(num_positions)
            rows = fit(_thin_out(self._rectangles, branch), num_rows) if self._lists else self._fit_rows(num_rows)
            return SampleShape(rows, num_queries)
        return self._list_positions(fit(self._sizes(branch), sum(num_positions)))

    def every(self, branches: Iterable[Branch]) -> Iterator[tuple[SampleShape, Branch]]:
        """Yield every shape and sampling branch that `fit` can return, with the largest shape of each branch first."""
        for branch in branches:
            if self._lists:
                for size in reversed(self._sizes(branch)):
                    yield self._list_positions(size), branch
            all_rows = _thin_out(self._rectangles, branch) if self._lists else self._rows
            for rows, queries in product(reversed(all_rows), reversed(self._queries)):
                if self._is_rectangle(queries, branch):
                    yield SampleShape(rows, queries), branch

    def _is_rectangle(self, num_queries: int, branch: Branch) -> bool:
        return not self._lists or (num_queries > 1 and self._needs_rectangle[branch.random])

    def _sizes(self, branch: Branch) -> tuple[int, ...]:
        if not self._needs_rectangle[branch.random]:
            return _thin_out(self._usual, branch)
        # These sizes are used only for steps without drafts. Verify steps have the same number of additional graphs.
        plain = tuple(size for size in self._usual if size <= fit(self._usual, self._max_rows))
        return _thin_out(plain, branch, at_least=2)

    def _list_positions(self, num_positions: int) -> SampleShape:
        return SampleShape(min(num_positions, self._max_rows), self._max_queries, num_positions)


def _thin_out(sizes: tuple[int, ...], branch: Branch, at_least: int = 1) -> tuple[int, ...]:
    """Return every n-th size, where n is 2 or 4 for branches that few requests need, and never less than `at_least`."""
    step = 4 if branch.is_rarest else 2 if branch.is_full else 1
    return sizes[:: -max(step, at_least)][::-1]


def _halve(largest: int, smallest: int) -> tuple[int, ...]:
    """Halve `largest` repeatedly, down to `smallest`, and return all sizes. A full batch with drafts fits exactly."""
    sizes = [largest]
    while sizes[-1] >= 2 * smallest:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(reversed(sizes))


def _contexts(max_len: int, widest: int, backend: DeviceBackend) -> tuple[int, ...]:
    # The last query of a padded chunk or of a verify step may be past the end of the longest context.
    reach = round_up(max_len + widest, 128)
    return (reach,) if backend.traits.exact_context_width else geometric(512, reach, 2.0)


_TOKENS_OF_A_FORWARD = 256
"""Number of padding tokens that take about as long as another forward pass, which reads all weights again."""

BLOCK_SHARING = 3
"""Assumed maximum number of requests with a common prefix that list the same KV block.

Without this limit, the largest bucket would be max_num_seqs * max_model_len, regardless of available memory. For this
reason, vllm-gaudi ran out of memory in warm-up until vllm-gaudi#1700 added this limit; a value of about 2 was observed
there.
"""


_SMALLEST_RANGE = 8
"""The smallest number of blocks that a decode reads in place. A step with fewer would hardly be faster."""

_COST_OF_GATHERING = 2
"""The number of blocks that a decode can attend to in place in about the time that it takes for one gathered block. A
gathered block is read, written and read again, but its scores are computed only once."""


def _entries(
    listed: tuple[int, ...] | None, max_entries: int, num_blocks: int | None, *, exclusive: bool
) -> tuple[int, ...]:
    needed = max_entries
    if num_blocks is not None:
        needed = min(max_entries, num_blocks if exclusive else BLOCK_SHARING * num_blocks)
    # If most decodes read blocks in place, fewer sizes for the others limit the number of graphs.
    entries = listed or geometric(1, needed, 4.0 if exclusive else 2.0)
    refuse_waste("block_buckets", entries, max_entries, "--max-num-seqs with --max-model-len")
    return entries


def _choose_prefill_rows(vllm_config: VllmConfig, options: Options, backend: DeviceBackend) -> tuple[int, ...]:
    lockstep = ranks_in_step(vllm_config) > 1
    # A batch with the width of one rank and the length of another might not be listed.
    rows = options.prefill_rows or ((1,) if lockstep else backend.traits.prefill_rows)
    if 1 not in rows:
        raise UnsupportedConfigError("additional_config.gaudi_spec.prefill_rows must contain 1.")
    if lockstep and rows != (1,):
        raise UnsupportedConfigError(
            "Data-parallel ranks that share experts run prompt chunks one by one; leave out "
            "additional_config.gaudi_spec.prefill_rows."
        )
    return rows


def _can_slice(vllm_config: VllmConfig) -> bool:
    """Whether a prompt chunk may take several rows.

    A request must have a single row if it has a recurrent state, has images, or is pooled; data-parallel peers run
    chunks one by one. Pipeline stages do not know whether all layers of the other stages support slices.
    """
    model = vllm_config.model_config
    has_parts = model.is_multimodal_model or model.runner_type == "pooling"
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    return not (has_parts or model.has_inner_state or ranks_in_step(vllm_config) > 1 or num_stages > 1)
