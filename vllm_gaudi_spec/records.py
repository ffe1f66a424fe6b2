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
    """A prompt of embeddings, or of embeddings and tokens.

    Drafters and penalties see token 0 in place of an embedding, or the token that the user passes for it.
    """

    rows_LH: torch.Tensor
    """Embeddings of all positions, including those of tokens, on the host."""
    is_embeds_np: np.ndarray
    """bool [L]: positions that are embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities of consecutive prompt tokens, on their way to the host."""

    wait: Callable[[], torch.Tensor]
    """Returns the copy on the host: int32 [tokens, 2 * (1 + count) + 1], ids, scores and ranks side by side."""
    num_tokens: int
    num_computed: int
    """How many of the most likely tokens were computed per position."""
    num_requested: int
    """How many of them the request asked for."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The host's view of a request. It exists until the request finishes, with or without a row."""

    req_id: str
    params: SamplingParams
    seed_words: tuple[int, int]
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    """Output tokens at admission. With custom logits processors, all output tokens that have reached the host."""
    row: int = NO_ROW
    all_token_ids: list[int] = field(default_factory=list)
    """All tokens at admission: the prompt, and the outputs if the request was preempted."""
    num_computed: int = 0
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
    """Log-probabilities of the prompt chunks computed so far."""
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    """Set for pooling requests. `params` is then a placeholder that belongs to no request."""
    embeds: PromptEmbeddings | None = None
    media_end: int = 0
    """On devices that capture graphs: the position after the last image, which only prompt chunks compute."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)


# --- batches ---

DECODE, PREFILL = "decode", "prefill"


class Shape(NamedTuple):
    """The shape of a forward: `rows` requests of `queries` tokens each, with at most `context` tokens of KV per row.

    For decodes on devices that list the blocks of all rows, `context` is the number of those blocks.
    """

    phase: str
    rows: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


class SampleShape(NamedTuple):
    """The positions of a sampling pass: `queries` positions of each of `rows` rows.

    If `positions` is not 0, the pass lists that many of these positions instead.
    """

    rows: int
    queries: int
    positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A batch on the host: B rows of Q tokens. Rows beyond `requests` are padding."""

    shape: Shape
    requests: list[Request]
    counts: list[int]
    """Tokens of each row: exact for a prompt chunk, the maximum for a decode, whose drafts the device counts."""
    ends: list[int]
    """The maximum number of tokens of KV of each row when the step ends, including the drafts that follow a decode."""
    finishes: list[bool]
    """Whether each request samples in this step, because its prompt does not continue."""

    def finishing(self) -> list[tuple[Request, int]]:
        """Return the requests that sample, and the maximum length of each including its drafts."""
        ends = [request.num_computed + count for request, count in zip(self.requests, self.counts, strict=True)]
        return list(compress(zip(self.requests, ends, strict=True), self.finishes))

    def num_positions(self) -> list[int]:
        """Return the maximum number of positions at which each sampling request samples."""
        counts = self.counts if self.shape.phase == DECODE else [1] * len(self.counts)
        return list(compress(counts, self.finishes))

    def continuing(self) -> list[Request]:
        return [request for request, finishes in zip(self.requests, self.finishes, strict=True) if not finishes]

    @property
    def num_sampled(self) -> int:
        """The number of positions at which a row of this batch may sample."""
        return self.shape.queries if self.shape.phase == DECODE else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Planned):
    """A planned batch whose rows are on the device."""

    inputs: StepInputs
    multimodal: MultimodalInputs | None = None
    token_types_T: torch.Tensor | None = None
    """int32 [B * Q]: which of two texts a token belongs to, for requests with two texts."""


class Listed(NamedTuple):
    """N of a batch's B * Q positions. Padding repeats the first one."""

    index_2N: torch.Tensor
    """int64: the batch row and the query of each position."""
    slots_BQ: torch.Tensor
    """int64: the index of each position in the list; undefined for positions that are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The B rows of a step that sample, at up to Q positions each, from all batches of the step.

    The last row of a prompt is a verification of zero drafts.
    """

    requests: list[Request]
    shape: SampleShape
    rows_np: np.ndarray
    """int32. Padding uses the pad row."""
    index_np: np.ndarray | None = None
    """int32 [2, N]: the batch row and the query of each position, if positions are listed."""
    slots_np: np.ndarray | None = None
    """int32 [B, Q]: the index of each position in the list."""

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
    """A model's output: hidden states of tokens."""

    last: torch.Tensor
    """The states from which logits are computed."""
    carried: torch.Tensor | None = None
    """The states that a head reads beside the next token; often the same."""


class Drafted(NamedTuple):
    """One draft per row."""

    tokens_B: torch.Tensor
    """int32."""
    probs_BV: torch.Tensor | None
    """float32: the distribution from which the tokens were sampled, if drafting is probabilistic."""
    sound_B: torch.Tensor | None = None
    """bool: whether the logits were finite, if that was checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A request that may draft, for proposers on the host."""

    req_id: str
    tokens_np: np.ndarray
    """int32 [n]: prompt and outputs. The view is valid only during the call."""
    num_prompt: int
    max_drafts: int
    """The maximum number of drafts that the request can use, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The rows of a step, for proposers on the device. Padding uses the pad row, with `max_drafts` 0."""

    rows_B: torch.Tensor
    """int64: rows of the request state."""
    history_RM: torch.Tensor
    """int32: prompt and outputs of every row. Tokens beyond a row's length are undefined."""
    lengths_B: torch.Tensor
    """int32: the number of tokens of each row, including the most recent one."""
    max_drafts_B: torch.Tensor
    """int32: the maximum number of drafts that each row can use, 0 to K."""
    num_drafts: int
    """K."""
    blocks: Blocks
    """The rows' KV blocks, with room for all drafts but the last. Empty if the drafter keeps no KV."""
    row_operations: RowOperations
    choose: Callable[[torch.Tensor, int], Drafted]
    """Chooses drafts as configured, with the rows' temperatures and filters. Takes a drafter's logits [B, V] in the
    target's token ids, which it may overwrite, and the number of earlier drafts."""
    hidden: Hidden | None = None
    """[B, H]: the state from which each row's first draft follows, for drafters that read hidden states."""


FAULTY = -1
"""In place of a row's number of drafts: its drafts cannot be used."""
UNVERIFIED = -2
"""In place of a row's number of verified drafts: a grammar or the scheduler removed all of them."""


class Drafts(NamedTuple):
    """The drafts of a batch."""

    tokens_BK: torch.Tensor
    """int32. Tokens beyond a row's `num_drafts` are undefined."""
    num_drafts_B: torch.Tensor
    """int32: at most `max_drafts_B`."""
    probs_BKV: torch.Tensor | None = None
    """float32: the distribution from which each draft was sampled, if drafting is probabilistic."""
    sound_BK: torch.Tensor | None = None
    """bool: whether the logits of each draft were finite. None for drafters without logits."""

    @property
    def for_host(self) -> Drafts:
        """The drafts as the host sees them: a faulty row has none."""
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
    """The outcome of one drafting round, as a worker reports it."""

    faulty: tuple[str, ...] = ()
    """Requests whose drafts could not be used."""
    worked: bool = True
    """Whether the drafts of at least one request could be used."""


# --- results ---


class Verification(NamedTuple):
    """The result of a sampling pass for B rows at Q positions each.

    An acceptance rule sets the tokens and their number, the sampling pass sets the rest.
    """

    tokens_BQ: torch.Tensor
    """int32. Only the first `num_sampled` tokens of a row are valid."""
    num_sampled_B: torch.Tensor
    """int32: the number of accepted drafts plus 1, or 0 for rows that do not sample in this step."""
    logprobs: LogprobsTensors | None = None
    """B * Q rows: the sampled token and the most likely tokens."""
    scores: LogprobsTensors | None = None
    """B * Q rows: the sampled token and the tokens that a request named."""
    num_drafts_B: torch.Tensor | None = None
    """int32: the number of verified drafts of each row, or `FAULTY` or `UNVERIFIED`. None without speculation."""


@dataclass(slots=True)
class StepResult:
    """The result of a step: requests that sampled, and requests whose prompt continues."""

    requests: list[Request]
    verification: Verification | None = None
    """None if no request sampled."""
    rows_B: torch.Tensor | None = None
    """int64: the rows of the sampling pass, on the device."""
    prompt_logprobs: list[tuple[Request, list[PromptScores]]] = field(default_factory=list)
    unfinished: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    """The requests whose prompt ended in this step, or that were resumed: they had no drafts to verify."""
    signature: tuple[Hashable, ...] = ()
    """The signature of the tensors that are copied to the host."""
    drafts: Drafts | None = None
    """Drafts for the next step, if they were made on the device and the scheduler needs them on the host."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """Drafting rounds of this step on the host."""


class WorkerCounts(NamedTuple):
    """What a worker reports about itself with each step's output, counted since warm-up."""

    steps: int
    num_host_syncs: int
    compiled: int
    coverage: Mapping[str, float]
    """The share of each vocabulary's tokens that have a counterpart in the other. Empty without universal drafting."""
    num_left: int = 0
    """The number of warm-up runs that wait for idle steps."""


class WarmUpWork(NamedTuple):
    """The number of graphs that warm-up makes, by kind, for estimates."""

    forwards: tuple[Shape, ...]
    """Forwards of the target."""
    num_passes: int
    """The number of sampling passes, reports and prompt scores."""
    num_pass_sizes: int
    """The number of sizes of sampling passes, whatever their branch."""
    num_drafter_runs: int
    num_ranks: int
    """The number of ranks that share the target."""

    @property
    def num_graphs(self) -> int:
        return len(self.forwards) + self.num_passes + self.num_drafter_runs
