"""Interfaces between the model runner and drafters.

A host proposer reads token histories on the host after the result of the step has been copied there. A device proposer
works with device tensors and never waits for the device, so it supports async scheduling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.records import Context, DraftRequest, Drafts, Hidden

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig

    from vllm_gaudi_spec.attention.metadata import Inputs
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.drafting.universal.pairs import Pair
    from vllm_gaudi_spec.graphs import Job, StepRecorder
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.records import Batch, DraftBatch, DraftRound, Request, SampledRows, StepResult
    from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
    from vllm_gaudi_spec.runner.kv_cache import KVCache
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes
    from vllm_gaudi_spec.sampling.branches import Branch
    from vllm_gaudi_spec.sampling.params import Sampling
    from vllm_gaudi_spec.scheduling.limits import RowLimits
    from vllm_gaudi_spec.step_inputs import RowInputs


class HostProposer(Protocol):
    def propose(self, contexts: list[Context]) -> list[Sequence[int]]:
        """Return up to `max_drafts` draft tokens for each context."""
        ...

    def forget(self, req_ids: Iterable[str]) -> None:
        """Discard the state of requests that have ended. Later requests may reuse their IDs."""
        ...

    @property
    def num_remembered(self) -> int:
        """Number of requests for which state is kept."""
        ...


class DrafterKVSync:
    """Keeps the drafter's KV and hidden states consistent with the tokens that the target accepts.

    This base class is also used for drafters without KV or hidden states, for which all methods do nothing.
    """

    has_kv = False
    """Whether drafting reads KV, either the drafter's own (which it also writes) or the target's."""
    reads_every_step = False
    """Whether the drafter processes new tokens after each verification, even if it does not draft afterwards."""

    # --- host ---

    def on_admitted(self) -> None:
        """Handle newly admitted requests, which are in `requests.admitted`."""

    def on_forward(self, batch: Batch) -> None:
        """Handle a batch after the target's forward pass."""

    def before_round(self, sampled: SampledRows, max_drafts_np: np.ndarray, batch: DraftBatch | None) -> None:
        """Write the drafter's KV for tokens that must have KV before drafting. Called after each verification.

        Args:
            max_drafts_np: Current maximum number of drafts for each request.
            batch: Rows on the device if the drafter has KV and either drafting follows or `reads_every_step` is set.
        """

    def on_drafted(self, requests: list[Request], max_drafts_np: np.ndarray) -> None:
        """Update host state after drafting."""

    def invalidate(self, requests: list[Request]) -> None:
        """Discard the drafter's state for these requests, because a forward pass failed or the KV may be wrong."""

    def on_faulty(self, requests: list[Request]) -> None:
        """Handle requests with unusable drafts, for which the drafter's KV may be wrong."""

    # --- device: called in the sampling pass and in rounds ---

    def on_verified(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Update device state after verification, which has already set row lengths to `lengths_B`."""

    def limit_drafts(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, max_drafts_B: torch.Tensor) -> torch.Tensor:
        """Return `max_drafts_B`, int32 [B], reduced in rows where the drafter has read too few tokens."""
        return max_drafts_B

    def gather_hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden | None:
        """Return the hidden states from which each row's first draft token is predicted, for drafters that use them."""
        return None

    def on_round_written(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        """Update device state after drafts and their KV have been written."""

    # --- warm-up ---

    def jobs(self) -> Iterator[Job]:
        """Yield warm-up runs for reads and state updates, but not for drafting itself."""
        yield from ()


class DeviceProposer(ABC):
    """A proposer that has static shapes and never waits for the device."""

    drafts_one_by_one = False
    """Whether drafting fewer tokens takes less time. If so, there is a graph for each number of drafts in
    `Speculation.widths`. Otherwise, the drafter always drafts k tokens."""

    @abstractmethod
    def propose(self, request: DraftRequest) -> Drafts:
        """Draft tokens for the rows in `request`."""

    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> DrafterKVSync:
        """Return the drafter's KV sync. The default is for drafters without KV or hidden states."""
        return DrafterKVSync()


class ReadBlocks:
    """Tracks the KV blocks that a drafter has read.

    To share blocks between requests, vLLM considers only the target's KV. The drafter's KV for a block may be missing
    if drafting was disabled, for one request or because of the load. Such a block is recorded as unread.
    """

    def __init__(self, requests: Requests, num_blocks: int, groups: list[int], *, keeps_up: bool = False) -> None:
        """
        Args:
            groups: The KV cache groups that contain the drafter's layers.
            keeps_up: Whether the drafter reads all tokens that the target computes, except in rows passed to `forget`.
        """
        self._tables = [requests.tables_np[group] for group in groups]
        self._sizes = [requests.block_sizes[group] for group in groups]
        self._counts = [requests.num_blocks[group] for group in groups]
        self._read_np = np.zeros(num_blocks, dtype=np.int32)
        """Number of tokens at the start of each block that the drafter has read. Block 0 is padding."""
        self._seen = [np.zeros_like(counts) for counts in self._counts]
        """Number of blocks in each row that this class has initialized or that were already computed at admission."""
        self._keeps_up = keeps_up

    def admit(self, row: int, num_computed: int) -> None:
        """Admit a row whose first `num_computed` tokens are in shared blocks.

        Call `clear_new` after all rows in a step have been admitted.
        """
        for seen, size in zip(self._seen, self._sizes, strict=True):
            seen[row] = num_computed // size

    def load(self, block_ids: list[int]) -> None:
        """Record the blocks that a KV connector fills.

        The blocks are marked as read if the drafter's KV is also transferred, and as unread otherwise.
        """
        self._read_np[block_ids] = max(self._sizes, default=0) if self._keeps_up else 0

    def clear_new(self) -> None:
        """Initialize the blocks that rows have received since the last call. They may have held other tokens."""
        for table, counts, seen, size in zip(self._tables, self._counts, self._seen, self._sizes, strict=True):
            for row in np.flatnonzero(counts > seen):
                self._read_np[table[row, seen[row] : counts[row]]] = size if self._keeps_up else 0
                seen[row] = counts[row]

    def count_read(self, row: int, num_computed: int) -> int:
        """Return the number of an admitted row's `num_computed` tokens that the drafter has read."""
        reach = num_computed
        for table, size in zip(self._tables, self._sizes, strict=True):
            blocks = table[row, : -(-num_computed // size)]
            end_np = np.minimum(size, num_computed - size * np.arange(len(blocks)))
            if (short := np.flatnonzero((blocks > 0) & (self._read_np[blocks] < end_np))).size:
                reach = min(reach, int(short[0]) * size + int(self._read_np[blocks[short[0]]]))
        return reach

    def forget(self, row: int) -> None:
        """Mark all blocks in a row as unread."""
        for table, counts in zip(self._tables, self._counts, strict=True):
            self._read_np[table[row, : counts[row]]] = 0

    def record_read(self, rows_np: np.ndarray, begins_np: np.ndarray, ends_np: np.ndarray) -> None:
        """Record that the drafter has read each row from `begins_np` up to `ends_np`."""
        for table, size in zip(self._tables, self._sizes, strict=True):
            first_np = begins_np // size
            count_np = -(-ends_np // size) - first_np
            # One entry per block, with the block's row and its index in the row's block table.
            row_np = np.repeat(np.arange(len(rows_np)), count_np)
            index_np = np.arange(len(row_np)) + (first_np + count_np - np.cumsum(count_np))[row_np]
            blocks_np = table[rows_np[row_np], index_np]
            self._read_np[blocks_np] = np.minimum(size, ends_np[row_np] - size * index_np)


class Model(Protocol):
    output_ids: torch.Tensor | None
    """int64: target token IDs for which there are logits, or None if the logits cover the model's whole vocabulary."""

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        """Write the KV for all T tokens and return their hidden states, [T, H]. Only draft heads use `carried_TH`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows, V], in the model's dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingContext:
    """The parts of a loaded runner that drafters need."""

    speculation: Speculation
    vllm_config: VllmConfig
    requests: Requests
    recorder: StepRecorder
    shapes: Shapes
    kv_cache: KVCache
    hidden_states: HiddenStateBuffer
    """The buffer with the target's hidden states."""
    target: LoadedModel
    drafter: LoadedModel | None
    """The drafter's model, or None for methods that have none."""
    sampling: Sampling
    pair: Pair | None = None
    """Both vocabularies, if the drafter's differs from the target's."""

    @property
    def spec_config(self) -> SpeculativeConfig:
        assert self.vllm_config.speculative_config is not None
        return self.vllm_config.speculative_config

    @property
    def device(self) -> torch.device:
        return self.requests.backend.traits.torch_device

    @property
    def max_rows(self) -> int:
        return self.requests.pad_row

    @property
    def max_model_len(self) -> int:
        return self.vllm_config.model_config.max_model_len

    @property
    def drafter_max_len(self) -> int:
        """The context length up to which the drafter stores KV in the target's blocks."""
        return min(self.speculation.drafter_max_len or self.max_model_len, self.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        size: int = self.vllm_config.model_config.get_vocab_size()
        return size

    def make_read_blocks(self, *, keeps_up: bool) -> ReadBlocks:
        """Return a tracker for the blocks that contain the drafter's KV. See `ReadBlocks` for `keeps_up`."""
        assert self.drafter is not None
        names = set(self.drafter.layer_names)
        groups = [index for index, layers in enumerate(self.kv_cache.layer_groups) if names & set(layers)]
        return ReadBlocks(self.requests, self.kv_cache.num_blocks, groups, keeps_up=keeps_up)


class Drafting:
    """Runs the drafter on the device within a step, or on the host after the step's device-to-host sync.

    Draft tokens are stored after the tokens of each row, where the next step verifies them. By default, methods do
    nothing, as in an engine without speculation. Subclasses override the methods that they need.
    """

    verifies_drafts = False
    """Whether steps report how many drafts they verified."""
    reports_drafts = False
    """Whether `propose` drafts tokens. If so, a step's report may include them."""
    lookahead = 0
    """The number of additional tokens for which a decode needs KV blocks, because the drafter writes their KV."""
    pass_drafts: tuple[int, ...] = (0,)
    """The numbers of drafts per row that a sampling pass may generate itself. With 0, `propose` generates them."""
    pass_error: Exception | None = None
    """The exception that stopped drafting in a sampling pass. `propose` handles the exception, because it knows which
    requests were affected."""

    # --- the scheduler ---

    def apply(self, requests: Requests) -> None:
        """Update state for requests that have been admitted or have ended."""

    def update_drafter_state(self, restarted: list[Request], excluded: list[Request], *, disabled: bool) -> None:
        """Apply the scheduler's decision about drafter faults (see `DrafterStatus`).

        If `disabled` is set, the scheduler no longer requests drafts, which is sufficient for host drafters. Device
        drafters must also stop following the target and, with async scheduling, ignore drafts that are in flight.
        """

    def cap_scheduled_drafts(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        """Return the maximum number of draft tokens for each request on the device, int32.

        This method is called with async scheduling, where only the device knows the number of drafts. The result never
        exceeds the scheduled number.
        """
        return np.array(num_scheduled, dtype=np.int32)

    def find_outgrown_requests(self) -> Collection[str]:
        """Return the requests that had no drafts in the last step because they exceeded the drafter's own limit."""
        return ()

    def take_rounds(self) -> list[DraftRound]:
        """Return and clear the results of drafting that the host has observed."""
        return []

    def get_draft_token_ids(self, step: StepResult) -> DraftTokenIds:
        """Return the draft tokens to verify after a step whose result is on the host."""
        return DraftTokenIds([], [])

    def in_use(self) -> dict[str, int]:
        """Return the number of requests with drafter state, by kind of state."""
        return {}

    # --- a step ---

    def host_drafts(self, requests: list[Request]) -> np.ndarray | None:
        """Return the draft tokens generated on the host, which are copied together with the step that verifies them.

        The result, int32 [requests, 1 + K], contains each request's number of draft tokens, followed by the tokens. It
        is None if drafts are generated on the device.
        """
        return None

    def put_host_drafts(self, requests: Requests, rows: RowInputs) -> None:
        """Write the draft tokens from `host_drafts` to the rows' histories. This runs inside a graph."""
        assert rows.more_BX is not None
        requests.put_host_drafts(rows.rows_B, rows.more_BX)

    def follow(self, batch: Batch) -> None:
        """Update the drafter's KV after the target's forward pass on a batch."""

    def gather_probs(self, rows_B: torch.Tensor, num_drafts: int) -> torch.Tensor | None:
        """Return the distributions of each row's first `num_drafts` drafts, float32 [B, J, V].

        Returns None if the rule does not need them.
        """
        return None

    def on_verified(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Update device state in the sampling pass, which has already set row lengths to `lengths_B`."""

    def choose_pass_drafts(self, max_drafts: int) -> tuple[int, int]:
        """Return the number of drafts (from `pass_drafts`) that the sampling pass generates and the maximum per row."""
        return 0, 0

    def draft_in_pass(self, rows_B: torch.Tensor, max_drafts_B: torch.Tensor, branch: Branch, num_drafts: int) -> None:
        """Draft on the device at the end of a sampling pass, if `choose_pass_drafts` requests it."""

    def propose(self, sampled: SampledRows, branch: Branch, max_drafts: int) -> bool:
        """Draft up to `max_drafts` tokens per row on the device, after verification.

        Returns whether the drafter ran. Host drafters use `propose_on_host` instead.
        """
        return False

    def propose_on_host(self, step: StepResult, max_drafts: int) -> None:
        """Draft on the host, after a step's result has been copied there."""

    # --- warm-up ---

    def propose_for_padding(self, num_rows: int, num_drafts: int) -> None:
        """Run the graphs for drafting after a decode that verified `num_drafts` drafts per row, with padding rows."""

    def jobs(self) -> Iterator[Job]:
        """Yield warm-up runs for every graph that drafting may use."""
        yield from ()
