"""Request state that persists between steps, with one row per running request.

The device stores the state that changes with every token: the token history and the number of tokens that have KV. Work
between two steps therefore never waits for the host. The host stores the scheduler's data: block tables and parameters.
Hidden states are in hidden_states.py.

Row `pad_row` belongs to no request. Padding reads from and writes to this row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from vllm_gaudi_spec.attention.flat import choose_group
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.device_rows import group_rows, group_sizes
from vllm_gaudi_spec.records import DECODE, FAULTY, NO_ROW, UNVERIFIED, Batch, DraftBatch, Drafts, Request
from vllm_gaudi_spec.sampling.noise import fold_seed, fresh_seed
from vllm_gaudi_spec.step_inputs import HostBlocks, StepInputs, make_host_counts, make_host_lengths

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.records import Planned, Shape, Verification
    from vllm_gaudi_spec.upstream.scheduler import CachedRequestData, NewRequestData


class Requests:
    def __init__(
        self,
        backend: DeviceBackend,
        *,
        max_rows: int,
        max_len: int,
        block_sizes: list[int],
        max_context: int,
        seed: int,
        windows: Sequence[int | None] | None = None,
        in_flight: int = 0,
        keeps_kv: bool = True,
    ) -> None:
        """Allocate the rows.

        Args:
            windows: Sliding window of the layers in each KV cache group, or None.
            in_flight: Maximum number of tokens by which the host may overestimate a row's length, including this step.
            keeps_kv: False for encoders, whose KV is needed only during one forward pass and whose requests get no
                blocks from the scheduler.
        """
        self.backend = backend
        self._windows = list(windows or [None] * len(block_sizes))
        self._in_flight = in_flight
        self.pad_row = max_rows
        self.block_sizes = block_sizes
        self.by_id: dict[str, Request] = {}
        self.admitted: list[Request] = []
        """Requests that were assigned rows by the last `apply`."""
        self.freed_rows: list[int] = []
        """Rows that were freed by the last `apply`."""
        self.ended: list[str] = []
        """IDs of requests that finished in the last `apply`."""
        self.loaded_blocks: list[int] = []
        """KV blocks that a KV connector fills in the current step."""
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._seed = seed
        self._num_seen = 0
        self._keeps_kv = keeps_kv
        sizes = block_sizes if keeps_kv else []
        self.tables_np = [np.zeros((max_rows + 1, -(-max_context // size)), dtype=np.int32) for size in sizes]
        self.num_blocks = [np.zeros(max_rows + 1, dtype=np.int64) for _ in sizes]
        self._last_block_R = np.zeros(max_rows + 1, dtype=np.int64)
        """The highest ID among the KV blocks of each row."""
        # The history is flat, because captured steps can change a tensor only as a whole, not through a view.
        self.max_len = max_len
        if (max_rows + 1) * max_len >= 2**31:  # token addresses have 32 bits
            raise UnsupportedConfigError(
                f"Token histories of {max_rows} requests of up to {max_len} tokens need more than 2^31 entries. Lower "
                "--max-num-seqs or --max-model-len."
            )
        self._history = torch.zeros((max_rows + 1) * max_len, dtype=torch.int32, device=backend.traits.torch_device)
        self.computed_R = torch.zeros(max_rows + 1, dtype=torch.int32, device=backend.traits.torch_device)
        self.num_drafts_R = torch.zeros(max_rows + 1, dtype=torch.int32, device=backend.traits.torch_device)
        """Number of drafts that await verification after the last token of each row, or `FAULTY`."""
        self._write_rows = backend.graphs.graph(self._start_rows)

    @staticmethod
    def count_history_bytes(max_rows: int, max_len: int) -> int:
        return (max_rows + 1) * max_len * torch.int32.itemsize

    @property
    def history_RM(self) -> torch.Tensor:
        """Return a read-only view of the tokens of all rows, int32 [R, M]."""
        return self._history.view(-1, self.max_len)

    def in_use(self) -> dict[str, int]:
        """Return the numbers of requests and rows in use, which are both 0 after a step that ends all requests."""
        return {"requests": len(self.by_id), "rows": self.pad_row - len(self._free_rows)}

    # --- the scheduler's output ---

    def apply(self, scheduled: SpecSchedulerOutput) -> None:
        """Apply the scheduler's output.

        Rows are freed before requests are admitted, because a request may end and its ID may be admitted again in the
        same step. IDs are sorted, because the iteration order of a set of strings differs between processes, but all
        ranks must assign the same rows.
        """
        self.admitted.clear()
        self.freed_rows.clear()
        self.ended.clear()
        self.loaded_blocks = scheduled.loaded_blocks
        for req_id in sorted(scheduled.finished_req_ids):
            if (request := self.by_id.pop(req_id, None)) is not None:
                self._free_row(request)
                self.ended.append(req_id)
        for req_id in sorted(scheduled.preempted_req_ids or ()):
            # A request that was preempted and then aborted before this step has already been removed above.
            if (request := self.by_id.get(req_id)) is not None:
                self._free_row(request)
        for new in scheduled.scheduled_new_reqs:
            self._apply_new(new)
        self._apply_cached(scheduled.scheduled_cached_reqs)
        if self.admitted:
            self._write_admitted()

    def find_running(self, req_ids: Iterable[str]) -> list[Request]:
        found = (self.by_id.get(req_id) for req_id in req_ids)
        return [request for request in found if request is not None and request.row != NO_ROW]

    def _apply_new(self, new: NewRequestData) -> None:
        params = new.sampling_params or SamplingParams()
        assert new.prompt_token_ids is not None
        prompt = list(new.prompt_token_ids)
        request = self.by_id.get(new.req_id)  # in vLLM's V2 protocol, a resumed request arrives as a new request
        if request is None:
            seed_words = self._seed_words(new.req_id, params.seed)
            request = Request(req_id=new.req_id, params=params, seed_words=seed_words, prompt=prompt)
            request.lora, request.pooling = new.lora_request, new.pooling_params
            self.by_id[new.req_id] = request
        self._give_row(request, list(new.prefill_token_ids or prompt), new.num_computed_tokens)
        self._append_blocks(request.row, new.block_ids)

    def _apply_cached(self, cached: CachedRequestData) -> None:
        for req_id, num_computed, new_blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self.by_id[req_id]
            if req_id in cached.resumed_req_ids:
                self._give_row(request, list(cached.all_token_ids[req_id]), num_computed)
            request.num_computed = num_computed
            if new_blocks is not None:
                self._append_blocks(request.row, new_blocks)

    def _seed_words(self, req_id: str, seed: int | None) -> tuple[int, int]:
        self._num_seen += 1
        return fold_seed(fresh_seed(self._seed, self._num_seen, req_id) if seed is None else seed)

    def _give_row(self, request: Request, token_ids: list[int], num_computed: int) -> None:
        self._free_row(request)
        row = request.row = self._free_rows.pop()
        request.all_token_ids, request.num_computed = token_ids, num_computed
        request.outputs[:] = token_ids[request.num_prompt :]
        request.prompt_logprobs.clear()
        for table, counts in zip(self.tables_np, self.num_blocks, strict=True):
            table[row] = 0
            counts[row] = 0
        self._last_block_R[row] = 0
        self.admitted.append(request)

    def _write_admitted(self) -> None:
        for together in group_rows(self.admitted):
            tokens_NM = np.zeros((len(together), self.max_len), dtype=np.int32)
            for tokens_M, request in zip(tokens_NM, together, strict=True):
                tokens_M[: len(request.all_token_ids)] = request.all_token_ids
            rows = [request.row for request in together]
            self._write(rows, tokens_NM, [request.num_computed for request in together])

    def _write(self, rows: list[int], tokens_NM: np.ndarray, num_computed: list[int]) -> None:
        self._write_rows(
            self._upload(np.array(rows)),
            self._upload(tokens_NM.reshape(-1)),
            self._upload(np.array(num_computed, dtype=np.int32)),
        )

    def warm_up(self) -> None:
        """Run the graphs that admit requests, using the pad row."""
        for num_rows in group_sizes(self.pad_row):
            tokens_NM = np.zeros((num_rows, self.max_len), dtype=np.int32)
            self._write([self.pad_row] * num_rows, tokens_NM, [0] * num_rows)

    def _start_rows(self, rows_N: torch.Tensor, tokens: torch.Tensor, num_computed_N: torch.Tensor) -> None:
        """Write the token histories of admitted rows. `tokens` is int32 [N * M]."""
        offsets_M = torch.arange(self.max_len, dtype=torch.int32, device=rows_N.device)
        self._history.index_copy_(0, (rows_N[:, None] * self.max_len + offsets_M).flatten(), tokens)
        self.computed_R.index_copy_(0, rows_N, num_computed_N)
        self._drop_drafts(rows_N)

    def _free_row(self, request: Request) -> None:
        if request.row != NO_ROW:
            self._free_rows.append(request.row)
            self.freed_rows.append(request.row)
            request.row = NO_ROW

    def _append_blocks(self, row: int, block_ids: tuple[list[int], ...]) -> None:
        for table, counts, ids in zip(self.tables_np, self.num_blocks, block_ids, strict=True):
            begin = counts[row]
            table[row, begin : begin + len(ids)] = ids
            counts[row] += len(ids)
            self._last_block_R[row] = max(self._last_block_R[row], *ids, 0)

    def find_last_block(self, members: Sequence[Request]) -> int:
        """Return the highest ID among the KV blocks of these requests."""
        return int(self._last_block_R[[request.row for request in members]].max(initial=0))

    def blocks(
        self, rows_np: np.ndarray, ends: Sequence[int], context: int, counts: Sequence[int] | None = None
    ) -> HostBlocks:
        """Return the block tables of rows, each wide enough for `context` tokens.

        `ends` contains the token counts of the first rows; all other rows are padding. For prompt chunks, `counts`
        contains the number of tokens in each chunk, and `ends` is exact.
        """
        if self._keeps_kv:
            tables = tuple(
                table[rows_np, : -(-context // size)]
                for table, size in zip(self.tables_np, self.block_sizes, strict=True)
            )
        else:
            tables = tuple(_assign_in_turn(len(rows_np), ends, context, size) for size in self.block_sizes)
        lengths_B = counts_B = None
        if self.backend.traits.needs_host_lengths:
            lengths_B = make_host_lengths(len(rows_np), ends, context)
            counts_B = None if counts is None else make_host_counts(len(rows_np), counts)
        return HostBlocks(tables, tuple(self.block_sizes), lengths_B=lengths_B, counts_B=counts_B)

    def decode_blocks(self, rows_np: np.ndarray, ends: Sequence[int], shape: Shape) -> HostBlocks:
        """Return the blocks for a decode whose first rows have `ends` tokens."""
        context = shape.context
        if not self.backend.traits.flat_decode:
            return self.blocks(rows_np, ends, context)
        tables, flat = [], []
        ends_np = np.zeros(len(rows_np), dtype=np.int64)
        ends_np[: len(ends)] = ends
        groups = zip(self.tables_np, self.num_blocks, self.block_sizes, self._windows, strict=True)
        for table, counts, size, window in groups:
            table_np = table[rows_np]
            # A padding row ends at 0 and therefore has no blocks.
            end_np = np.minimum(-(-ends_np // size), counts[rows_np])
            begin_np, length, incomplete = np.zeros_like(ends_np), context, 1
            if window is not None:
                begin_np = np.maximum(ends_np - self._in_flight - window, 0) // size
                length = min(context, len(rows_np) * (1 + -(-(window + self._in_flight) // size)))
                incomplete = 2  # an entry may begin before the window
            tables.append(table_np)
            if shape.in_place:
                flat.append(_list_owners(table_np, end_np, context))
                continue
            group = choose_group(length, len(rows_np), incomplete)
            num_entries = (length + len(rows_np) * incomplete * (group - 1)) // group
            flat.append(_list_blocks(table_np, begin_np, end_np, num_entries, group))
        return HostBlocks(tuple(tables), tuple(self.block_sizes), tuple(flat))

    # --- batches, padded to a shape and copied to the device ---

    def pad_rows(self, members: Sequence[Request], size: int) -> np.ndarray:
        """Return the rows of `members`, followed by copies of the pad row, int32 [size]."""
        rows_np = np.full(size, self.pad_row, dtype=np.int32)
        rows_np[: len(members)] = [request.row for request in members]
        return rows_np

    def make_batch(self, planned: Planned, max_drafts: int = 0, more: np.ndarray | None = None) -> Batch:
        """Copy host data for a batch to the device: rows, token counts, and KV blocks.

        Args:
            planned: The planned batch.
            max_drafts: For device drafters, the maximum number of drafts per row after this step.
            more: Data for each request from a drafter that runs on the host.
        """
        shape, members, counts = planned.shape, planned.requests, planned.counts
        header_np = np.zeros((4, shape.rows), dtype=np.int32)
        header_np[0] = rows_np = self.pad_rows(members, shape.rows)
        header_np[1, : len(members)] = planned.starts
        header_np[2, : len(members)] = counts
        header_np[3, : len(members)] = max_drafts
        if shape.phase == DECODE:
            blocks = self.decode_blocks(rows_np, planned.ends, shape)
        else:
            blocks = self.blocks(rows_np, planned.ends, shape.context, counts)
        more_np = None
        if more is not None:
            more_np = np.zeros((shape.rows, more.shape[1]), dtype=np.int32)
            more_np[: len(members)] = more
        return Batch(
            shape=shape,
            requests=members,
            starts=planned.starts,
            counts=counts,
            ends=planned.ends,
            finishes=planned.finishes,
            inputs=StepInputs.pack(header_np, blocks, self.backend.memory.upload, more_np),
        )

    def make_draft_batch(
        self, members: list[Request], ends: list[int], shape: Shape, max_drafts: int = 0
    ) -> DraftBatch:
        """Copy rows to the device for a drafter, with blocks that have room for `ends` tokens.

        `max_drafts` is the maximum number of drafts per row.
        """
        header_np = np.zeros((4, shape.rows), dtype=np.int32)
        header_np[0] = rows_np = self.pad_rows(members, shape.rows)
        header_np[3, : len(members)] = max_drafts
        blocks = self.decode_blocks(rows_np, ends, shape)
        return DraftBatch(StepInputs.pack(header_np, blocks, self.backend.memory.upload), shape)

    # --- state on the device ---

    def tokens_at(self, rows_B: torch.Tensor, positions_BQ: torch.Tensor) -> torch.Tensor:
        """Return the tokens at these positions in the row histories, as int32 in the shape of `positions_BQ`."""
        shape = positions_BQ.shape
        index = rows_B.view(-1, *[1] * (len(shape) - 1)) * self.max_len + positions_BQ
        return self._history.index_select(0, index.flatten()).view(shape)

    def advance(self, rows_B: torch.Tensor, last_B: torch.Tensor, verification: Verification) -> None:
        """Append the sampled tokens and clear the drafts of the rows.

        `last_B` is the position of the last token in each row before this step.
        """
        self._append(rows_B, last_B + 1, verification.tokens_BQ, verification.num_sampled_B)
        # All tokens except the newest have KV.
        self.set_computed(rows_B, last_B + verification.num_sampled_B)
        self._drop_drafts(rows_B)

    def _drop_drafts(self, rows_B: torch.Tensor) -> None:
        # In CANN before about 8.3, index_fill_ would read each index on the host.
        self.num_drafts_R.index_copy_(0, rows_B, torch.zeros_like(rows_B, dtype=torch.int32))

    def count_reported_drafts(self, rows_B: torch.Tensor, num_verified_B: torch.Tensor) -> torch.Tensor:
        """Return the number of verified drafts in each row, in the encoding reported to the host, int32 [B].

        The number is `FAULTY` if the drafter failed, and `UNVERIFIED` if drafts existed but none was verified.
        """
        num_drafts_B = self.num_drafts_R.index_select(0, rows_B)
        reported_B = torch.where((num_drafts_B > 0) & (num_verified_B == 0), UNVERIFIED, num_verified_B)
        return torch.where(num_drafts_B == FAULTY, FAULTY, reported_B).int()

    def lengths(self, rows_B: torch.Tensor) -> torch.Tensor:
        """Return the lengths of rows that have sampled, int32 [B]. All tokens except the newest have KV."""
        return self.computed_R.index_select(0, rows_B) + 1

    def drafts(self, rows_B: torch.Tensor, num_drafts: int) -> Drafts:
        """Return the drafts that await verification, at most `num_drafts` per row, and none in faulty rows."""
        offsets_K = torch.arange(num_drafts, dtype=torch.int32, device=rows_B.device)
        tokens_BK = self.tokens_at(rows_B, self.lengths(rows_B)[:, None] + offsets_K)
        return Drafts(tokens_BK, self.num_drafts_R.index_select(0, rows_B).clamp(min=0))

    def put_drafts(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        """Write drafts after the first `lengths_B` tokens of each row, where the next step verifies them."""
        self._append(rows_B, lengths_B, drafts.tokens_BK, drafts.num_drafts_B)
        self.backend.row_operations.put(self.num_drafts_R, rows_B, drafts.num_drafts_B, pad_row=self.pad_row)

    def put_host_drafts(self, rows_B: torch.Tensor, more_BX: torch.Tensor) -> None:
        """Write drafts generated on the host. Each row of `more_BX` contains the number of drafts and the tokens."""
        num_drafts_B, tokens_BK = more_BX.split([1, more_BX.shape[1] - 1], dim=1)
        self.put_drafts(rows_B, self.lengths(rows_B), Drafts(tokens_BK, num_drafts_B.squeeze(1)))

    def put_scheduled_tokens(self, rows_B: torch.Tensor, starts_B: torch.Tensor, more_BX: torch.Tensor) -> None:
        """Write the tokens that another pipeline stage sampled and drafted.

        Each row of `more_BX` holds the number of drafts, the newest token (whose position is `starts_B`), and the
        drafts, in this order.
        """
        num_drafts_B1, tokens_BQ = more_BX.split([1, more_BX.shape[1] - 1], dim=1)
        num_drafts_B = num_drafts_B1.squeeze(1)
        self.set_computed(rows_B, starts_B)
        self._append(rows_B, starts_B, tokens_BQ, 1 + num_drafts_B)
        self.backend.row_operations.put(self.num_drafts_R, rows_B, num_drafts_B, pad_row=self.pad_row)

    def _append(
        self, rows_B: torch.Tensor, first_B: torch.Tensor, tokens_BN: torch.Tensor, num_B: torch.Tensor
    ) -> None:
        """Write each row's first `num_B` tokens, starting at position `first_B`. The rest go to the pad row."""
        self.backend.row_operations.append(
            self._history, rows_B, first_B, tokens_BN, num_B, width=self.max_len, pad_row=self.pad_row
        )

    def set_computed(self, rows_B: torch.Tensor, computed_B: torch.Tensor) -> None:
        """Set the number of tokens that have KV in each row. The pad row's number stays 0."""
        self.backend.row_operations.put(self.computed_R, rows_B, computed_B, pad_row=self.pad_row)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return self.backend.memory.upload(torch.from_numpy(array))


def _assign_in_turn(num_rows: int, ends: Sequence[int], context: int, block_size: int) -> np.ndarray:
    """Return consecutive blocks for each row, starting with block 1, int32 [B, W]. They belong to this batch only."""
    counts_np = np.zeros(num_rows, dtype=np.int32)
    counts_np[: len(ends)] = -(-np.asarray(ends, dtype=np.int32) // block_size)
    first_np = 1 + counts_np.cumsum(dtype=np.int32) - counts_np
    offsets_np = np.arange(-(-context // block_size), dtype=np.int32)
    return np.where(offsets_np < counts_np[:, None], first_np[:, None] + offsets_np, 0)


def _list_blocks(
    table_np: np.ndarray, begin_np: np.ndarray, end_np: np.ndarray, num_entries: int, group: int
) -> np.ndarray:
    """Return the blocks of rows from `begin_np` to `end_np` in the `Blocks.flat` format, with `group` blocks per entry.

    Padding entries belong to no row. For a resumed request, vLLM replaces blocks before the sliding window with block
    0. Such blocks are omitted.
    """
    used_np = _select_used(table_np, begin_np, end_np)
    rows, width = used_np.shape
    blocks = np.zeros((rows, -(-width // group), group), dtype=np.int32)
    blocks.reshape(rows, -1)[:, :width] = used_np
    row, index = np.nonzero(np.bitwise_or.reduce(np.moveaxis(blocks, -1, 0)))
    listed = np.zeros((group + 2, num_entries), dtype=np.int32)
    listed[-2] = rows
    listed[:-2].reshape(num_entries, group)[: len(row)] = blocks[row, index]
    listed[-2:, : len(row)] = row, index * group
    return listed


def _list_owners(table_np: np.ndarray, end_np: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return the owners of the first `num_blocks` blocks in the KV cache, in the `Blocks.flat` format for blocks that
    are read in place."""
    used_np = _select_used(table_np, np.zeros_like(end_np), end_np)
    row, index = np.nonzero(used_np)
    owners_np = np.zeros((2, num_blocks), dtype=np.int32)
    owners_np[0] = len(table_np)
    owners_np[:, used_np[row, index]] = row, index
    return owners_np


def _select_used(table_np: np.ndarray, begin_np: np.ndarray, end_np: np.ndarray) -> np.ndarray:
    """Return the first columns of block tables, with 0 for blocks that are not between `begin_np` and `end_np`."""
    table_np = table_np[:, : max(int(end_np.max(initial=0)), 1)]
    index_np = np.arange(table_np.shape[1])
    return np.where((index_np >= begin_np[:, None]) & (index_np < end_np[:, None]), table_np, 0)
