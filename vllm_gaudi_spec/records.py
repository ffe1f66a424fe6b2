"""Records exchanged between the parts of a step, from the scheduler's output to the report.

The letters at the end of a tensor's name denote its dimensions. These letters are the same in every file:

    B  rows in a batch              P  rows of prompt chunks        T  tokens, flattened
    R  rows in the request state    M  tokens in a row's history    L  tokens in a prompt chunk
    Q  positions per row, k + 1     K  drafts per row               H  hidden size
    V  target vocabulary size       U  drafter vocabulary size      D  attention head size
    G  KV cache groups              N  KV blocks                    W  blocks in a block table, words in a bit mask

A digit denotes a dimension of that size. Files that use other letters define them at the top.
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
    """Log-probabilities of consecutive prompt tokens that are being copied to the host."""

    wait: Callable[[], torch.Tensor]
    """Waits for the copy and returns it: int32 [tokens, 2 * (1 + num_computed) + 1] with IDs, scores and ranks."""
    num_tokens: int
    num_computed: int
    """Number of most likely tokens that are computed for each position."""
    num_requested: int
    """Number of most likely tokens that the request asks for."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The host's view of an unfinished request, with or without a row."""

    req_id: str
    params: SamplingParams
    seed_words: tuple[int, int]
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    """Output tokens, as known to the host. After admission, they are updated only for custom logits processors."""
    row: int = NO_ROW
    all_token_ids: list[int] = field(default_factory=list)
    """All tokens at admission: the prompt and, if the request was resumed, its earlier outputs."""
    num_computed: int = 0
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
    """Scores of the prompt chunks computed so far."""
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    """How to pool the prompt, or None if the request generates tokens. If set, `params` is a placeholder."""
    media_end: int = 0
    """Position after the last image, if steps are captured. Only prompt chunks can compute earlier positions."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)


# --- batches ---

DECODE, PREFILL = "decode", "prefill"


class Shape(NamedTuple):
    """The shape of a batch: `rows` requests with `queries` tokens each, and the context size.

    `context` is the maximum number of KV tokens per row. For a decode on a device with a flat block list, it is the
    maximum total number of KV blocks.
    """

    phase: str
    rows: int
    queries: int
    context: int
    in_place: bool = False
    """Whether a decode reads the first `context` blocks of the KV cache in place instead of gathering listed blocks."""

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


class SampleShape(NamedTuple):
    """The positions for which a sampling pass computes logits.

    If `positions` is 0, logits are computed for all `queries` positions in each of the `rows` rows. Otherwise, they are
    computed for a list of this many positions.
    """

    rows: int
    queries: int
    positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A batch of B rows with Q tokens each, on the host. Rows after those of `requests` are padding."""

    shape: Shape
    requests: list[Request]
    """The request in each row. Several rows may contain slices of the prompt chunk of one request."""
    starts: list[int]
    """Position of the first token in each row, as known to the host."""
    counts: list[int]
    """Number of tokens per row. It is exact for prompt chunks but an upper bound for decodes, in which only the device
    knows the number of drafts."""
    ends: list[int]
    """Maximum number of KV tokens in each row after the step, including the drafts that follow a decode."""
    finishes: list[bool]
    """Whether the request in each row samples after that row. False if its prompt continues in a later row or step."""

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
    """A list of N positions out of the B * Q positions in a batch. Padding repeats the first position."""

    index_2N: torch.Tensor
    """int64: batch row and query index of each listed position."""
    slots_BQ: torch.Tensor
    """int64: index in the list for each position of the batch. Unlisted positions have arbitrary values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The B rows that sample in a step, each at up to Q positions.

    A single sampling pass covers all of these rows, regardless of which batches computed them. The end of a prompt is
    treated as a verification of zero drafts.
    """

    requests: list[Request]
    shape: SampleShape
    rows_np: np.ndarray
    """int32 [B]: rows in the request state. Padding uses the pad row."""
    index_np: np.ndarray | None = None
    """int32 [2, N]: batch row and query index of each listed position, or None if all positions are sampled."""
    slots_np: np.ndarray | None = None
    """int32 [B, Q]: the index in the list for each position, or None if all positions are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows that sampled in a step, as input for device drafters."""

    requests: list[Request]
    ends: list[int]
    """Maximum number of tokens that each request may have now, including the drafts of this step."""
    num_queries: int
    """Number of positions per row that the step verified."""
    decode: Batch | None
    """The step's batch, if the step consists of a single decode. Drafters can then reuse its rows and blocks."""


class DraftBatch(NamedTuple):
    """Rows on the device for which tokens are drafted, as a padded batch like that of a decode."""

    inputs: StepInputs
    """The rows and their KV blocks, which have room for the drafts."""
    shape: Shape
    """The shape of a decode of these rows with one query each."""


# --- drafts ---


class Hidden(NamedTuple):
    """Output of a model, which consists of hidden states for tokens."""

    last: torch.Tensor
    """The hidden states from which logits are computed."""
    carried: torch.Tensor | None = None
    """The hidden states that a head reads together with the next token, or None if it reads `last`."""


class Drafted(NamedTuple):
    """One draft token per row."""

    tokens_B: torch.Tensor
    """int32"""
    probs_BV: torch.Tensor | None
    """float32: the distribution from which each token was sampled. It is set only in probabilistic drafting."""
    sound_B: torch.Tensor | None = None
    """bool: whether the logits contain neither NaN nor +inf. None if the logits were not checked."""


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
    """The rows to draft for, as input for device proposers. Padding uses the pad row with `max_drafts_B` set to 0."""

    rows_B: torch.Tensor
    """int64: rows in the request state."""
    history_RM: torch.Tensor
    """int32: prompt and outputs of every row. Values after the end of a row are undefined."""
    lengths_B: torch.Tensor
    """int32: number of tokens in each row, including the newest token."""
    max_drafts_B: torch.Tensor
    """int32: maximum number of drafts that each row can use, from 0 to K."""
    num_drafts: int
    """K, the number of tokens to draft per row."""
    blocks: Blocks
    """The KV blocks of the rows, with room for all drafts except the last. Empty if the drafter has no KV."""
    row_operations: RowOperations
    choose: Callable[[torch.Tensor, int], Drafted]
    """Chooses draft tokens, given logits [B, V] over target tokens and the number of earlier drafts.

    The function applies the drafting mode and the rows' temperatures and filters and may overwrite the logits.
    """
    hidden: Hidden | None = None
    """[B, H]: the hidden state from which each row's first draft is predicted, for drafters that use hidden states."""


FAULTY = -1
"""Replaces the number of drafts in rows with unusable drafts."""
UNVERIFIED = -2
"""Replaces the number of verified drafts in rows in which a grammar or the scheduler removed all drafts."""


class Drafts(NamedTuple):
    tokens_BK: torch.Tensor
    """int32. Values after the first `num_drafts_B` tokens of a row are arbitrary."""
    num_drafts_B: torch.Tensor
    """int32: number of drafts in each row, or `FAULTY`."""
    probs_BKV: torch.Tensor | None = None
    """float32: the distribution from which each draft was sampled. It is set only in probabilistic drafting."""
    sound_BK: torch.Tensor | None = None
    """bool: whether the logits for each draft contain neither NaN nor +inf. None if drafts do not use logits."""

    @property
    def for_host(self) -> Drafts:
        """The drafts to report to the host, in which rows with a fault have no drafts."""
        return Drafts(self.tokens_BK, self.num_drafts_B.clamp(min=0))


class NoDraftReason(StrEnum):
    """The reason why a request decodes without drafts. Each reason is also a label value of a metric
    (docs/reference/metrics.md)."""

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
    """The outcome of drafting in a step, as reported by a worker."""

    faulty: tuple[str, ...] = ()
    """Requests with unusable drafts."""
    worked: bool = True
    """Whether at least one request had usable drafts."""


# --- results ---


class Verification(NamedTuple):
    """The result of a sampling pass for B rows with Q positions each.

    The acceptance rule sets the tokens and their number; the sampling pass sets the other fields.
    """

    tokens_BQ: torch.Tensor
    """int32. Only the first `num_sampled_B` tokens of a row are valid."""
    num_sampled_B: torch.Tensor
    """int32: number of accepted drafts plus one, or 0 in rows that do not sample in this step."""
    logprobs: LogprobsTensors | None = None
    """B * Q rows, each with the sampled token and the most likely tokens."""
    scores: LogprobsTensors | None = None
    """B * Q rows, each with the sampled token and the tokens that a request has specified."""
    num_drafts_B: torch.Tensor | None = None
    """int32: number of verified drafts in each row, or `FAULTY` or `UNVERIFIED`. None without speculation."""


@dataclass(slots=True)
class StepResult:
    """The result of a step, both for requests that sampled and for requests whose prompt continues."""

    requests: list[Request]
    verification: Verification | None = None
    """The result of the sampling pass, or None if no request sampled."""
    rows_B: torch.Tensor | None = None
    """int64: the rows of the sampling pass, on the device."""
    packed: torch.Tensor | None = None
    """float32: the report of a step without log-probabilities. It includes any drafts from the sampling pass."""
    prompt_logprobs: list[tuple[Request, list[PromptScores]]] = field(default_factory=list)
    unfinished: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    """Requests without drafts to verify because their prompt ended in this step or because they were resumed."""
    signature: tuple[Hashable, ...] = ()
    """Sizes of the tensors that are copied to the host (see `report_sizes`)."""
    drafts: Drafts | None = None
    """Drafts for the next step, if they were generated on the device but the scheduler needs them on the host."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """The outcomes of drafting in this step, as observed by the host."""


class WorkerCounts(NamedTuple):
    """Counters of a worker since warm-up, which are reported with the output of each step."""

    steps: int
    num_host_syncs: int
    compiled: int
    coverage: Mapping[str, float]
    """Fraction of each vocabulary that has a match in the other one. Empty if both are the same."""
    num_prefill_tokens: int = 0
    """Number of real tokens in prompt chunks."""
    num_prefill_padding: int = 0
    """Number of padding tokens that were computed together with them."""
    step_times: Mapping[int, Sequence[float]] = {}
    """Maps the number of rows in a decode to seconds measured in warm-up, for each number of drafts per row. Empty
    without adaptive verification."""
