"""The records that the parts of a step pass on, from the scheduler's output to the report. Imports only types.

Letters at the end of a tensor's name are its dimensions. In every file:

    B  rows of a batch              P  rows of prompt chunks        T  tokens, flat
    R  rows of the request state    M  tokens of a row's history    L  tokens of a prompt chunk
    Q  positions a row, k + 1       K  drafts a row                 H  hidden size
    V  vocabulary of the target     U  vocabulary of the drafter    D  size of an attention head
    G  KV cache groups              N  KV blocks                    W  blocks of a block table, words of a bit mask

A digit is that many. Another letter has a legend at the top of its file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors

    from vllm_gaudi_spec.attention.metadata import Blocks, MultimodalInputs, StepInputs
    from vllm_gaudi_spec.attention.row_operations import RowOperations

# --- requests ---

NO_ROW = -1


class PromptEmbeddings(NamedTuple):
    """A prompt of embeddings in place of tokens, or of both. The token of an embedding is 0, or what the user
    passes for it: drafters and penalties see that."""

    rows_LH: torch.Tensor
    """On the host: of all positions, those of tokens included."""
    is_embeds_np: np.ndarray
    """bool [L]: which positions are embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities of neighboring tokens of a prompt, on their way to the host."""

    wait: Callable[[], torch.Tensor]
    """Returns the copy on the host: int32 [tokens, 2 * (1 + count) + 1], ids, scores and ranks side by side."""
    num_tokens: int
    num_computed: int
    """How many of the likeliest tokens were computed for each position,"""
    num_requested: int
    """and how many of those the request asked for."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The host's view of a request. It lives until the request finishes, with or without a row."""

    req_id: str
    params: SamplingParams
    seed_words: tuple[int, int]
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    """Output tokens that have reached the host, for processors that users bring; else those at admission."""
    row: int = NO_ROW
    all_token_ids: list[int] = field(default_factory=list)
    """All tokens at admission: the prompt, and outputs if the request was preempted."""
    num_computed: int = 0
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
    """Those of the prompt chunks done so far."""
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    """What is made of its prompt in place of tokens; `params` are then those of nobody."""
    embeds: PromptEmbeddings | None = None
    media_end: int = 0
    """Where steps are captured: the position after the last image, which only prompt chunks compute."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)


# --- batches ---

DECODE, PREFILL = "decode", "prefill"


class Shape(NamedTuple):
    """`rows` requests with `queries` tokens each, over at most `context` tokens of KV a row; for a decode on a device
    that lists the blocks of all rows, over at most `context` blocks of KV."""

    phase: str
    rows: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


class SampleShape(NamedTuple):
    """Where a sampling pass has logits: at `queries` positions of each of `rows` rows; or, where `positions` is not 0,
    at so many of those, which are listed one by one."""

    rows: int
    queries: int
    positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A batch on the host: B rows of Q tokens; rows after those of `requests` are padding."""

    shape: Shape
    requests: list[Request]
    counts: list[int]
    """The host's number of tokens a row: exact for a prompt chunk, the most for a decode, whose drafts the device
    counts."""
    ends: list[int]
    """The most tokens of KV that each row may have when the step ends; for a decode with the drafts that follow it."""
    finishes: list[bool]
    """Requests that sample in this step: all but those whose prompt goes on."""

    def finishing(self) -> list[tuple[Request, int]]:
        """Requests that sample, and the most tokens that each has then, its drafts included."""
        ends = [request.num_computed + count for request, count in zip(self.requests, self.counts, strict=True)]
        return list(compress(zip(self.requests, ends, strict=True), self.finishes))

    def num_positions(self) -> list[int]:
        """Of each request that samples: the most positions at which it may."""
        counts = self.counts if self.shape.phase == DECODE else [1] * len(self.counts)
        return list(compress(counts, self.finishes))

    def continuing(self) -> list[Request]:
        return [request for request, finishes in zip(self.requests, self.finishes, strict=True) if not finishes]

    @property
    def num_sampled(self) -> int:
        """Positions at which a row of this batch may sample."""
        return self.shape.queries if self.shape.phase == DECODE else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Planned):
    """A planned batch whose rows are on the device."""

    inputs: StepInputs
    multimodal: MultimodalInputs | None = None
    token_types_T: torch.Tensor | None = None
    """int32 [B * Q]: which of two texts a token is of, where a request has two."""


class Listed(NamedTuple):
    """N of the B * Q positions of a batch. Padding repeats the first."""

    index_2N: torch.Tensor
    """int64: the row in the batch of each, and its query."""
    slots_BQ: torch.Tensor
    """int64: where the list has each position; any for those that it does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The B rows of a step that sample, at up to Q positions each: one pass over all of them, whatever batch computed
    them.

    A row that comes from a prompt is a verify of zero drafts.
    """

    requests: list[Request]
    shape: SampleShape
    rows_np: np.ndarray
    """int32; padding has the pad row."""
    index_np: np.ndarray | None = None
    """int32 [2, N], where positions are listed: the row in the batch of each, and its query,"""
    slots_np: np.ndarray | None = None
    """int32 [B, Q]: and where the list has each position."""

    @property
    def num_queries(self) -> int:
        return self.shape.queries


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows that sampled in a step, for drafters on the device."""

    requests: list[Request]
    ends: list[int]
    """The most tokens that each request may have now, its drafts of this step included."""
    num_queries: int
    """Positions of each row that the step verified."""
    decode: Batch | None
    """The step's batch, if it is one decode: a drafter reads its rows and blocks, which are on the device already."""
    rows_alone: StepInputs | None
    """The same without the blocks, for a drafter without KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """The rows of a round of drafts, on the device, in a rectangle like those of decodes."""

    requests: list[Request]
    ends: list[int]
    num_queries: int
    """As in `SampledRows`."""
    inputs: StepInputs
    """With room in the blocks for the drafts that follow."""
    context: int
    """Of the blocks, as `Shapes` counts it for decodes; 0 without blocks."""


# --- drafts ---


class Hidden(NamedTuple):
    """Hidden states of tokens: the output of a model."""

    last: torch.Tensor
    """What logits are computed from."""
    carried: torch.Tensor | None = None
    """What a head reads of them, beside the token that follows; often the same."""


class Drafted(NamedTuple):
    """One draft a row."""

    tokens_B: torch.Tensor
    """int32."""
    probs_BV: torch.Tensor | None
    """float32: the distribution that the tokens were drawn from; the probabilistic mode only."""
    sound_B: torch.Tensor | None = None
    """bool: whether the logits were numbers, where that was checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A request that may draft, for proposers on the host."""

    req_id: str
    tokens_np: np.ndarray
    """int32 [n]: prompt and outputs. A view that is valid during the call only."""
    num_prompt: int
    max_drafts: int
    """At least 1: the most drafts that this request has use for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The rows of a step, for proposers on the device. Padding has the pad row and `max_drafts` 0."""

    rows_B: torch.Tensor
    """int64: rows of the request state."""
    history_RM: torch.Tensor
    """int32: prompt and outputs of every row; nothing after a row's length is to be read."""
    lengths_B: torch.Tensor
    """int32: tokens of each row, the newest included."""
    max_drafts_B: torch.Tensor
    """int32: the most drafts that a row has use for, 0 to K."""
    num_drafts: int
    """K."""
    blocks: Blocks
    """The rows' KV blocks, with room for all drafts but the last; none where the drafter keeps no KV."""
    row_operations: RowOperations
    choose: Callable[[torch.Tensor, int], Drafted]
    """From a drafter's logits [B, V] in the target's ids, which it may change, and the number of drafts before, to
    drafts: as configured, with the rows' temperatures and filters."""
    hidden: Hidden | None = None
    """[B, H]: what each row's first draft follows from, for drafters that read hidden states."""


FAULTY = -1
"""In place of a row's number of drafts: there are none, because what was drafted cannot be used."""
UNVERIFIED = -2
"""In place of how many of a row's drafts a step verified: it had some, and a grammar or the scheduler removed all."""


class Drafts(NamedTuple):
    """The drafts of a batch."""

    tokens_BK: torch.Tensor
    """int32; after a row's `num_drafts` any token."""
    num_drafts_B: torch.Tensor
    """int32: at most `max_drafts_B`."""
    probs_BKV: torch.Tensor | None = None
    """float32: the distribution that each draft was drawn from, where drafting is probabilistic."""
    sound_BK: torch.Tensor | None = None
    """bool: whether the logits that each draft was chosen from were numbers; None where there were none."""

    @property
    def for_host(self) -> Drafts:
        """As reported to the host: a row with a fault has no drafts."""
        return Drafts(self.tokens_BK, self.num_drafts_B.clamp(min=0))


class NoDraftReason(StrEnum):
    """Why a request decodes without drafts: the values of a metric's label (docs/metrics.md)."""

    REQUEST = "request"
    LENGTH = "length"
    ENDING = "ending"
    LOAD = "load"
    GOODPUT = "goodput"
    ACCEPTANCE = "acceptance"
    NOTHING = "nothing"
    UNVERIFIED = "unverified"
    FAULT = "fault"
    OFF = "off"


class DraftRound(NamedTuple):
    """The outcome of one round of drafting, as a worker reports it."""

    faulty: tuple[str, ...] = ()
    """Requests whose drafts could not be used."""
    worked: bool = True
    """Whether the drafter worked for at least one request."""


# --- results ---


class Verification(NamedTuple):
    """What a sampling pass decided for B rows at Q positions each. An acceptance rule fills in the tokens and their
    number, the pass around it the rest."""

    tokens_BQ: torch.Tensor
    """int32; only the first `num_sampled` of a row count."""
    num_sampled_B: torch.Tensor
    """int32: accepted drafts and one more; 0 for rows that do not sample in this step."""
    logprobs: LogprobsTensors | None = None
    """B * Q rows: the sampled token and the likeliest."""
    scores: LogprobsTensors | None = None
    """B * Q rows: the sampled token and those that a request named."""
    num_drafts_B: torch.Tensor | None = None
    """int32: how many drafts of each row were verified, or `FAULTY`, or `UNVERIFIED`; None without speculation."""


@dataclass(slots=True)
class StepResult:
    """The result of a step: requests that sampled, and requests whose prompt goes on."""

    requests: list[Request]
    verification: Verification | None = None
    """None when no request sampled."""
    rows_B: torch.Tensor | None = None
    """int64: the rows of the sampling pass, on the device."""
    prompt_logprobs: list[tuple[Request, list[PromptScores]]] = field(default_factory=list)
    unfinished: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    """Those of `requests` whose prompt ended in this step, or that were resumed: there was nothing to verify."""
    signature: tuple[Hashable, ...] = ()
    """Of the tensors that are copied to the host."""
    drafts: Drafts | None = None
    """For the next step, where a proposer on the device made them and the scheduler needs them on the host."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """Rounds of this step that the host itself observed."""


class WorkerCounts(NamedTuple):
    """What a worker reports of itself with each step's output; counted since warm-up."""

    steps: int
    num_host_syncs: int
    compiled: int
    coverage: Mapping[str, float]
    """Share of the output that each vocabulary covers; empty where the drafter has the target's vocabulary."""
    num_left: int = 0
    """Runs of warm-up that wait for idle steps."""


class WarmUpWork(NamedTuple):
    """What warm-up makes, by kind, for estimates."""

    forwards: tuple[Shape, ...]
    """Of the target."""
    num_passes: int
    """Sampling passes, reports and scores of prompts."""
    num_pass_sizes: int
    """Sizes of sampling passes, whatever their branch."""
    num_drafter_runs: int
    num_ranks: int
    """That the target is split over."""

    @property
    def num_graphs(self) -> int:
        return len(self.forwards) + self.num_passes + self.num_drafter_runs
