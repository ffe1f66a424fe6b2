"""Records that are passed between the parts of a step, from the scheduler's output to the report.

The letters at the end of a tensor's name denote its dimensions. In every file:

    B  rows in a batch              P  rows of prompt chunks        T  tokens, flattened
    R  rows in the request state    M  tokens in a row's history    L  tokens in a prompt chunk
    Q  positions per row, k + 1     K  drafts per row               H  hidden size
    V  target vocabulary size       U  drafter vocabulary size      D  attention head size
    G  KV cache groups              N  KV blocks                    W  blocks in a block table, words in a bit mask

A digit denotes a dimension of that size. Files that use other letters explain them at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors

    from vllm_gaudi_spec.attention.metadata import Blocks, MultimodalInputs
    from vllm_gaudi_spec.attention.row_operations import RowOperations
    from vllm_gaudi_spec.step_inputs import StepInputs

# --- requests ---

NO_ROW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities of consecutive prompt tokens, which are being copied to the host."""

    wait: Callable[[], torch.Tensor]
    """Waits for the copy and returns it, as int32 [tokens, 2 * (1 + num_computed) + 1] with IDs, scores and ranks."""
    num_tokens: int
    num_computed: int
    """Number of most likely tokens computed for each position."""
    num_requested: int
    """Number of most likely tokens that the request asked for."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The host's view of a request, with or without a row. It lives until the request finishes."""

    req_id: str
    params: SamplingParams
    seed_words: tuple[int, int]
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    """Output tokens on the host. Updated after admission only if there are custom logits processors."""
    row: int = NO_ROW
    all_token_ids: list[int] = field(default_factory=list)
    """All tokens at admission: the prompt and, for a resumed request, its earlier outputs."""
    num_computed: int = 0
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
    """Scores for the prompt chunks computed so far."""
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    """How to pool the prompt, or None if the request generates. If set, `params` is a placeholder."""
    media_end: int = 0
    """Position after the last image. Only prompt chunks can compute earlier positions. Set where steps are captured."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)


# --- batches ---

DECODE, PREFILL = "decode", "prefill"


class Shape(NamedTuple):
    """The shape of a batch: `rows` requests with `queries` tokens each, and the context size.

    `context` is the maximum number of KV tokens per row. For a decode on a device that uses a flat block list, it is
    the maximum total number of KV blocks.
    """

    phase: str
    rows: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


class SampleShape(NamedTuple):
    """The positions for which a sampling pass has logits.

    If `positions` is 0, these are all `queries` positions in each of `rows` rows. Otherwise, it is the number of listed
    positions.
    """

    rows: int
    queries: int
    positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A batch on the host, with B rows of Q tokens. Rows beyond `requests` are padding."""

    shape: Shape
    requests: list[Request]
    """The request for each row. Several rows may contain slices of one request's prompt chunk."""
    starts: list[int]
    """Position of each row's first token, as known to the host."""
    counts: list[int]
    """Number of tokens per row. This is exact for a prompt chunk but an upper bound for a decode, where only the device
    knows the number of drafts."""
    ends: list[int]
    """Maximum number of KV tokens in each row after the step. For a decode, this includes the drafts that follow."""
    finishes: list[bool]
    """Whether each row's request samples after this row, which it does unless its prompt continues later."""

    @classmethod
    def make_padding(cls, shape: Shape) -> Planned:
        """Return a batch without requests for warm-up."""
        return cls(shape=shape, requests=[], starts=[], counts=[], ends=[], finishes=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Planned):
    """A planned batch whose rows have been copied to the device."""

    inputs: StepInputs
    multimodal: MultimodalInputs | None = None
    token_types_T: torch.Tensor | None = None
    """int32 [B * Q]: which of its request's two texts a token belongs to. None if no request has two texts."""
    received_TW: torch.Tensor | None = None
    """The previous pipeline stage's output (`model.join_stage_tensors`). None on the first stage."""


class PositionList(NamedTuple):
    """A list of N of the B * Q positions in a batch. Padding repeats the first one."""

    index_2N: torch.Tensor
    """int64: batch row and query index of each listed position."""
    slots_BQ: torch.Tensor
    """int64: list index of each position. Unlisted positions have arbitrary values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The B rows that sample in a step, at up to Q positions each.

    One sampling pass covers all of them, regardless of which batch computed them. A row at the end of its prompt is
    treated as a verification of zero drafts.
    """

    requests: list[Request]
    shape: SampleShape
    rows_np: np.ndarray
    """int32 [B]: request-state rows. Padding uses the pad row."""
    index_np: np.ndarray | None = None
    """int32 [2, N]: batch row and query index of each listed position, or None for a rectangle."""
    slots_np: np.ndarray | None = None
    """int32 [B, Q]: list index of each position, or None for a rectangle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows that sampled in a step, for device drafters."""

    requests: list[Request]
    ends: list[int]
    """Maximum number of tokens that each request may now have, including this step's drafts."""
    num_queries: int
    """Number of positions that the step verified in each row."""
    decode: Batch | None
    """The step's batch if it is a single decode. A drafter can then reuse its rows and blocks on the device."""


class DraftBatch(NamedTuple):
    """The rows of a drafting round on the device, which form a rectangle as in a decode."""

    inputs: StepInputs
    """The rows and their blocks, which have room for the drafts."""
    context: int
    """Context size, in the same unit as in a decode's `Shape`."""


# --- drafts ---


class Hidden(NamedTuple):
    """A model's output, which consists of hidden states for tokens."""

    last: torch.Tensor
    """The hidden states from which logits are computed."""
    carried: torch.Tensor | None = None
    """The hidden states that a head reads together with the next token, or None if the head reads `last`."""


class Drafted(NamedTuple):
    """One draft per row."""

    tokens_B: torch.Tensor
    """int32"""
    probs_BV: torch.Tensor | None
    """float32: the distribution that each token was drawn from. Only set in probabilistic mode."""
    sound_B: torch.Tensor | None = None
    """bool: whether the logits were sound (no NaN or +inf). None if that was not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A request that may have drafts, as input for host proposers."""

    req_id: str
    tokens_np: np.ndarray
    """int32 [n]: prompt and outputs, as a view that is valid only during the call."""
    num_prompt: int
    max_drafts: int
    """Maximum number of drafts that this request can use, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The rows to draft for, as input for device proposers. Padding uses the pad row, with `max_drafts_B` 0."""

    rows_B: torch.Tensor
    """int64: request-state rows."""
    history_RM: torch.Tensor
    """int32: prompt and outputs for every row. Values beyond a row's length are undefined."""
    lengths_B: torch.Tensor
    """int32: number of tokens in each row, including the newest token."""
    max_drafts_B: torch.Tensor
    """int32: maximum number of drafts that each row can use, from 0 to K."""
    num_drafts: int
    """Number of drafts to make per row, K."""
    blocks: Blocks
    """The rows' KV blocks, with room for all drafts except the last. Empty if the drafter has no KV."""
    row_operations: RowOperations
    choose: Callable[[torch.Tensor, int], Drafted]
    """Chooses drafts, given logits [B, V] over the target's IDs and the number of earlier drafts.

    It applies the configured mode and the rows' temperatures and filters, and may overwrite the logits.
    """
    hidden: Hidden | None = None
    """[B, H]: the hidden state that predicts each row's first draft, for drafters that read hidden states."""


FAULTY = -1
"""Replaces the number of drafts in a row whose drafts cannot be used."""
UNVERIFIED = -2
"""Replaces the number of verified drafts in a row where a grammar or the scheduler removed all of them."""


class Drafts(NamedTuple):
    """The drafts for a batch."""

    tokens_BK: torch.Tensor
    """int32. Values after a row's first `num_drafts_B` tokens are arbitrary."""
    num_drafts_B: torch.Tensor
    """int32: number of drafts in each row, or `FAULTY`."""
    probs_BKV: torch.Tensor | None = None
    """float32: the distribution that each draft was drawn from. Only set in probabilistic mode."""
    sound_BK: torch.Tensor | None = None
    """bool: whether the logits for each draft were sound. None if drafts were not made from logits."""

    @property
    def for_host(self) -> Drafts:
        """The drafts to report to the host, with no drafts for faulty rows."""
        return Drafts(self.tokens_BK, self.num_drafts_B.clamp(min=0))


class NoDraftReason(StrEnum):
    """The reason that a request decodes without drafts. It is a metric label value (docs/reference/metrics.md)."""

    REQUEST = "request"
    LENGTH = "length"
    ENDING = "ending"
    LOAD = "load"
    GOODPUT = "goodput"
    NOTHING = "nothing"
    UNVERIFIED = "unverified"
    FAULT = "fault"
    OFF = "off"


class DraftRound(NamedTuple):
    """The outcome of a drafting round, as reported by a worker."""

    faulty: tuple[str, ...] = ()
    """Requests whose drafts could not be used."""
    worked: bool = True
    """Whether the drafts of at least one request could be used."""


# --- results ---


class Verification(NamedTuple):
    """The result of a sampling pass for B rows with Q positions each.

    The acceptance rule sets the tokens and their number, and the sampling pass sets the other fields.
    """

    tokens_BQ: torch.Tensor
    """int32. Only the first `num_sampled_B` tokens in a row are valid."""
    num_sampled_B: torch.Tensor
    """int32: number of accepted drafts plus one, or 0 for rows that do not sample in this step."""
    logprobs: LogprobsTensors | None = None
    """B * Q rows, each for the sampled token and the most likely tokens."""
    scores: LogprobsTensors | None = None
    """B * Q rows, each for the sampled token and the tokens that a request specified."""
    num_drafts_B: torch.Tensor | None = None
    """int32: number of verified drafts in each row, `FAULTY` or `UNVERIFIED`. None without speculation."""


@dataclass(slots=True)
class StepResult:
    """The result of a step, for requests that sampled and for requests whose prompt continues."""

    requests: list[Request]
    verification: Verification | None = None
    """The sampling pass's result, or None if no request sampled."""
    rows_B: torch.Tensor | None = None
    """int64: the sampling pass's rows, on the device."""
    packed: torch.Tensor | None = None
    """float32: the report for a step without log-probabilities. It includes any drafts that the sampling pass made."""
    prompt_logprobs: list[tuple[Request, list[PromptScores]]] = field(default_factory=list)
    unfinished: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    """Requests that had nothing to verify because their prompt ended in this step or they were resumed."""
    signature: tuple[Hashable, ...] = ()
    """Sizes of the tensors that are copied to the host (see `report_sizes`)."""
    drafts: Drafts | None = None
    """Drafts for the next step, if they were made on the device but the scheduler needs them on the host."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """This step's drafting rounds, as observed by the host."""


class WorkerCounts(NamedTuple):
    """A worker's counters since warm-up, reported with each step's output."""

    steps: int
    num_host_syncs: int
    compiled: int
    coverage: Mapping[str, float]
    """Share of each vocabulary that has a counterpart in the other. Empty if drafter and target share a vocabulary."""
    num_prefill_tokens: int = 0
    """Number of real tokens in prompt chunks."""
    num_prefill_padding: int = 0
    """Number of padding tokens that were computed along with them."""
    step_times: Mapping[int, Sequence[float]] = {}
    """Maps decode rows to warm-up seconds for each number of drafts per row. Empty without adaptive verification."""
