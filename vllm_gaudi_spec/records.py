"""Records that the parts of a step pass to each other, from the scheduler's output to the report.

Letters at the end of a tensor's name are its dimensions. In every file:

    B  rows of a batch              P  rows of prompt chunks        T  tokens, flat
    R  rows of the request state    M  tokens of a row's history    L  tokens of a prompt chunk
    Q  positions a row, k + 1       K  drafts a row                 H  hidden size
    V  vocabulary of the target     U  vocabulary of the drafter    D  size of an attention head
    G  KV cache groups              N  KV blocks                    W  blocks of a block table, words of a bit mask

A digit is a dimension of that size. Files that use other letters explain them at the top.
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
    """Log-probabilities of consecutive prompt tokens, on their way to the host."""

    wait: Callable[[], torch.Tensor]
    """Waits for the copy and returns it: int32 [tokens, 2 * (1 + num_computed) + 1] with ids, scores and ranks side by
    side."""
    num_tokens: int
    num_computed: int
    """Number of the likeliest tokens computed for each position."""
    num_requested: int
    """Number of those that the request asked for."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The host's view of a request, with or without a row. It lives until the request finishes."""

    req_id: str
    params: SamplingParams
    seed_words: tuple[int, int]
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    """Output tokens that have reached the host, if the user brought logits processors; else those at admission."""
    row: int = NO_ROW
    all_token_ids: list[int] = field(default_factory=list)
    """All tokens at admission: the prompt, and the outputs of a preempted request."""
    num_computed: int = 0
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
    """Scores of the prompt chunks computed so far."""
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    """How to pool the prompt; None if the request generates. `params` is then a placeholder."""
    media_end: int = 0
    """Position after the last image, which only prompt chunks can compute; set where steps are captured."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)


# --- batches ---

DECODE, PREFILL = "decode", "prefill"


class Shape(NamedTuple):
    """`rows` requests with `queries` tokens each, and the size of the context that they attend to.

    `context` is the most tokens of KV per row or, for a decode on a device that lists the blocks of all rows, the most
    KV blocks in total.
    """

    phase: str
    rows: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


class SampleShape(NamedTuple):
    """The positions at which a sampling pass has logits.

    These are `queries` positions of each of `rows` rows or, if `positions` is not 0, that many of them, listed one by
    one.
    """

    rows: int
    queries: int
    positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A batch on the host: B rows of Q tokens. Rows after those of `requests` are padding."""

    shape: Shape
    requests: list[Request]
    """The request of each row. Several rows may hold slices of one request's prompt chunk."""
    starts: list[int]
    """Position of each row's first token, as the host counts."""
    counts: list[int]
    """Number of tokens per row: exact for a prompt chunk, an upper bound for a decode, whose drafts the device
    counts."""
    ends: list[int]
    """Most tokens of KV that each row may have when the step ends. For a decode this includes the drafts that follow
    it."""
    finishes: list[bool]
    """Whether each row's request samples after it: all do but those whose prompt continues, in a later step or row."""

    @classmethod
    def make_padding(cls, shape: Shape) -> Planned:
        """Return a batch without requests, for warm-up."""
        return cls(shape=shape, requests=[], starts=[], counts=[], ends=[], finishes=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Planned):
    """A planned batch whose rows are on the device."""

    inputs: StepInputs
    multimodal: MultimodalInputs | None = None
    token_types_T: torch.Tensor | None = None
    """int32 [B * Q]: which of its request's two texts a token belongs to; None where no request has two."""


class PositionList(NamedTuple):
    """N of the B * Q positions of a batch. Padding repeats the first one."""

    index_2N: torch.Tensor
    """int64: row in the batch and query of each listed position."""
    slots_BQ: torch.Tensor
    """int64: index in the list of each position; arbitrary for positions that are not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The B rows of a step that sample, at up to Q positions each.

    One pass samples them all, whichever batch computed them. A row that comes from a prompt is a verification of zero
    drafts.
    """

    requests: list[Request]
    shape: SampleShape
    rows_np: np.ndarray
    """int32 [B]; padding has the pad row."""
    index_np: np.ndarray | None = None
    """int32 [2, N]: row in the batch and query of each listed position; None for a rectangle."""
    slots_np: np.ndarray | None = None
    """int32 [B, Q]: index in the list of each position; None for a rectangle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows that sampled in a step, for drafters on the device."""

    requests: list[Request]
    ends: list[int]
    """Most tokens that each request may have now, including this step's drafts."""
    num_queries: int
    """Number of positions of each row that the step verified."""
    decode: Batch | None
    """The step's batch if it is a single decode, so that a drafter can reuse its rows and blocks on the device."""


class DraftBatch(NamedTuple):
    """The rows of a drafting round on the device, in a rectangle like that of a decode."""

    inputs: StepInputs
    """The rows, and blocks with room for the drafts that follow."""
    context: int
    """Size of the blocks, as `Shapes` counts it for decodes."""


# --- drafts ---


class Hidden(NamedTuple):
    """A model's output: hidden states of tokens."""

    last: torch.Tensor
    """States from which logits are computed."""
    carried: torch.Tensor | None = None
    """States that a head reads beside the following token; None if they are `last`."""


class Drafted(NamedTuple):
    """One draft per row."""

    tokens_B: torch.Tensor
    """int32"""
    probs_BV: torch.Tensor | None
    """float32: the distribution that the tokens were drawn from; in probabilistic mode only."""
    sound_B: torch.Tensor | None = None
    """bool: whether the logits were finite; None where that was not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A request that may draft, for proposers on the host."""

    req_id: str
    tokens_np: np.ndarray
    """int32 [n]: prompt and outputs. A view that is valid only during the call."""
    num_prompt: int
    max_drafts: int
    """Most drafts that this request can use; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The rows of a step, for proposers on the device. Padding uses the pad row, with `max_drafts` 0."""

    rows_B: torch.Tensor
    """int64: rows of the request state."""
    history_RM: torch.Tensor
    """int32: prompt and outputs of every row. Do not read past a row's length."""
    lengths_B: torch.Tensor
    """int32: number of tokens of each row, including the newest."""
    max_drafts_B: torch.Tensor
    """int32: most drafts that a row can use, from 0 to K."""
    num_drafts: int
    """K."""
    blocks: Blocks
    """KV blocks of the rows, with room for all drafts but the last; empty if the drafter keeps no KV."""
    row_operations: RowOperations
    choose: Callable[[torch.Tensor, int], Drafted]
    """Chooses drafts from a drafter's logits [B, V] over the target's ids and the number of earlier drafts.

    It applies the configured mode and the rows' temperatures and filters. It may overwrite the logits.
    """
    hidden: Hidden | None = None
    """[B, H]: the state that each row's first draft follows from, for drafters that read hidden states."""


FAULTY = -1
"""Replaces a row's number of drafts when its drafts cannot be used."""
UNVERIFIED = -2
"""Replaces a row's number of verified drafts when a grammar or the scheduler removed all of them."""


class Drafts(NamedTuple):
    """The drafts of a batch."""

    tokens_BK: torch.Tensor
    """int32; arbitrary after the first `num_drafts_B` tokens of a row."""
    num_drafts_B: torch.Tensor
    """int32: number of drafts of each row, or `FAULTY`."""
    probs_BKV: torch.Tensor | None = None
    """float32: the distribution that each draft was drawn from; in probabilistic mode only."""
    sound_BK: torch.Tensor | None = None
    """bool: whether the logits of each draft were finite; None if drafts come from no logits."""

    @property
    def for_host(self) -> Drafts:
        """The drafts as reported to the host, where a faulty row has none."""
        return Drafts(self.tokens_BK, self.num_drafts_B.clamp(min=0))


class NoDraftReason(StrEnum):
    """Why a request decodes without drafts; the label values of a metric (docs/reference/metrics.md)."""

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
    """The outcome of one drafting round, as a worker reports it."""

    faulty: tuple[str, ...] = ()
    """Requests whose drafts could not be used."""
    worked: bool = True
    """Whether the drafts of at least one request could be used."""


# --- results ---


class Verification(NamedTuple):
    """The result of a sampling pass for B rows at Q positions each.

    An acceptance rule fills in the tokens and their number, and the pass around it the rest.
    """

    tokens_BQ: torch.Tensor
    """int32; only the first `num_sampled_B` tokens of a row count."""
    num_sampled_B: torch.Tensor
    """int32: number of accepted drafts plus one; 0 for rows that do not sample in this step."""
    logprobs: LogprobsTensors | None = None
    """B * Q rows: the sampled token and the likeliest tokens."""
    scores: LogprobsTensors | None = None
    """B * Q rows: the sampled token and the tokens that a request named."""
    num_drafts_B: torch.Tensor | None = None
    """int32: number of verified drafts of each row, `FAULTY` or `UNVERIFIED`; None without speculation."""


@dataclass(slots=True)
class StepResult:
    """The result of a step: requests that sampled, and requests whose prompt continues."""

    requests: list[Request]
    verification: Verification | None = None
    """Result of the sampling pass; None if no request sampled."""
    rows_B: torch.Tensor | None = None
    """int64: the rows of the sampling pass, on the device."""
    packed: torch.Tensor | None = None
    """float32: the report of a step without log-probabilities, and with drafts only if the pass made them."""
    prompt_logprobs: list[tuple[Request, list[PromptScores]]] = field(default_factory=list)
    unfinished: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    """Requests without anything to verify: their prompt ended in this step, or they were resumed."""
    signature: tuple[Hashable, ...] = ()
    """Sizes of the tensors that are copied to the host, see `report_sizes`."""
    drafts: Drafts | None = None
    """Drafts for the next step, if they were made on the device and the scheduler needs them on the host."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """Rounds of this step that the host observed."""


class WorkerCounts(NamedTuple):
    """A worker's counters since warm-up, reported with each step's output."""

    steps: int
    num_host_syncs: int
    compiled: int
    coverage: Mapping[str, float]
    """Fraction of the output that each vocabulary covers; empty if the drafter has the target's vocabulary."""
    num_prefill_tokens: int = 0
    """Number of real tokens in prompt chunks."""
    num_prefill_padding: int = 0
    """Number of tokens of padding that were computed with them."""
    step_times: Mapping[int, Sequence[float]] = {}
    """Maps the rows of a decode to its seconds in warm-up, for each number of drafts per row; empty unless adaptive."""
