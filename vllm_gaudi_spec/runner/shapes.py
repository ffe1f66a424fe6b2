"""The closed list of step shapes: every rectangle that a configuration can reach, and the smallest that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_spec.config import Options, UnsupportedConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.backends.base import DeviceBackend

_SMALLEST_PREFILL = 16


class Shape(NamedTuple):
    """`rows` requests with `queries` tokens each, over at most `context` tokens of KV."""

    phase: str
    rows: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


@dataclass(frozen=True, slots=True)
class Shapes:
    decode_rows: tuple[int, ...]
    decode_queries: tuple[int, ...]
    """1 for plain decoding, and 1 + k when there are drafts to verify."""
    prefill_rows: tuple[int, ...]
    prefill_queries: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def from_config(cls, vllm_config: VllmConfig, options: Options, backend: DeviceBackend, num_drafts: int) -> Shapes:
        scheduler = vllm_config.scheduler_config
        if num_drafts > backend.max_drafts:
            raise UnsupportedConfigError(
                f"Device {backend.name} verifies at most {backend.max_drafts} drafts a step; "
                "set num_speculative_tokens in --speculative-config to that or less."
            )
        longest_chunk = min(scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len)
        prefill = options.prefill_buckets or _geometric(_SMALLEST_PREFILL, longest_chunk, backend.prefill_growth)
        decode = options.batch_buckets or _batch_sizes(scheduler.max_num_seqs)
        _must_cover("batch_buckets", decode, scheduler.max_num_seqs, "--max-num-seqs")
        _must_cover("prefill_buckets", prefill, longest_chunk, "--max-num-batched-tokens")
        rows = options.prefill_rows or backend.prefill_rows
        if 1 not in rows:
            raise UnsupportedConfigError("additional_config.gaudi_spec.prefill_rows must contain 1.")
        contexts = _contexts(vllm_config.model_config.max_model_len, max(prefill[-1], 1 + num_drafts), backend)
        return cls(
            decode_rows=decode,
            decode_queries=(1,) if num_drafts == 0 else (1, 1 + num_drafts),
            prefill_rows=rows,
            prefill_queries=prefill,
            contexts=contexts,
        )

    def of_length(self, max_len: int, backend: DeviceBackend) -> Shapes:
        """The same batches, of rows that are as long as that."""
        # A drafter's round may read one token more than a verify step has.
        widest = max(self.prefill_queries[-1], self.decode_queries[-1] + 1)
        return replace(self, contexts=_contexts(max_len, widest, backend))

    @property
    def max_context(self) -> int:
        return self.contexts[-1]

    def fit_rows(self, num_rows: int) -> int:
        """The bucket for so many rows that sample in one step."""
        return _fit(self.decode_rows, num_rows)

    def fit_context(self, num_tokens: int) -> int:
        return _fit(self.contexts, num_tokens)

    def decode(self, num_rows: int, num_queries: int, context: int) -> Shape:
        return Shape("decode", _fit(self.decode_rows, num_rows), num_queries, _fit(self.contexts, context))

    def prefill(self, num_rows: int, longest: int, end: int) -> Shape:
        queries = _fit(self.prefill_queries, longest)
        # Padding reaches as far as the bucket does, so the context must cover that too.
        return Shape(
            "prefill",
            _fit(self.prefill_rows, num_rows),
            queries,
            _fit(self.contexts, end + queries - longest),
        )

    def prefill_rows_at(self, queries: int) -> int:
        """How many chunks of this bucket may share a step without exceeding the longest single one."""
        bucket = _fit(self.prefill_queries, queries)
        return max(rows for rows in self.prefill_rows if rows == 1 or rows * bucket <= self.prefill_queries[-1])

    def all(self) -> list[Shape]:
        """Every shape, largest first: memory is claimed once, by the shape that needs most."""
        shapes = [
            Shape("prefill", rows, queries, context)
            for queries in self.prefill_queries
            for rows in self.prefill_rows
            if rows <= self.prefill_rows_at(queries)
            for context in self.contexts
        ]
        shapes += [
            Shape("decode", rows, queries, context)
            for rows in self.decode_rows
            for queries in self.decode_queries
            for context in self.contexts
        ]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.context), reverse=True)


def _contexts(max_len: int, widest: int, backend: DeviceBackend) -> tuple[int, ...]:
    # The last query of a padded chunk, or of a verify step, may stand behind the longest context.
    reach = _round_up(max_len + widest, 128)
    return (reach,) if backend.exact_context_width else _geometric(512, reach, 2.0)


def _fit(buckets: tuple[int, ...], size: int) -> int:
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise AssertionError(f"{size} is larger than the largest bucket {buckets[-1]}")
    return buckets[index]


def _must_cover(name: str, buckets: tuple[int, ...], needed: int, option: str) -> None:
    if buckets[-1] < needed:
        raise UnsupportedConfigError(
            f"additional_config.gaudi_spec.{name} ends at {buckets[-1]}, but {option} needs {needed}; "
            f"add a bucket or lower {option}."
        )


def _batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ...: at most a third of a step is padding."""
    sizes: Iterable[int] = (step << exponent for exponent in range(largest.bit_length()) for step in (2, 3))
    return tuple(sorted({1, largest, *(size for size in sizes if size <= largest)}))


def _geometric(smallest: int, largest: int, growth: float) -> tuple[int, ...]:
    """Multiples of `smallest` that grow by at most about `growth`, up to one that covers `largest`."""
    buckets = [smallest]
    while buckets[-1] < largest:
        buckets.append(max(buckets[-1] + smallest, _round_down(int(buckets[-1] * growth), smallest)))
    buckets[-1] = _round_up(largest, smallest)
    return tuple(buckets)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_down(value: int, multiple: int) -> int:
    return value // multiple * multiple
