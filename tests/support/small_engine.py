"""vLLM's scheduler and this project's runner around a model that is a few lines of arithmetic: thousands of steps a
second, of which every one goes through the real bookkeeping.

The model keeps a number for each token and position in its KV slots, and its next token follows from the sum over
the row's context, read through the block table. So a token that stands at a wrong position, a block of somebody else, a
row that was not cleared, or a length that is off by one changes the row's tokens.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.full_tests.tiny_models import VOCAB, byte_tokenizer, common
from tests.support.fakes import CopyingMemory, HostBackend
from tests.support.releases import hash_options
from tests.unit.test_config import engine_config, save_block_drafter
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.attention.torch_ops import copy_blocks
from vllm_gaudi_spec.drafting.base import DraftingContext
from vllm_gaudi_spec.drafting.head import HeadProposer, make_head_translation
from vllm_gaudi_spec.drafting.mtp import AssistantProposer, ChainedProposer
from vllm_gaudi_spec.drafting.parallel import ParallelHeadProposer
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.records import Hidden
from vllm_gaudi_spec.recurrent.states import LayerShape, RecurrentStates
from vllm_gaudi_spec.runner.model_runner import ModelRunner
from vllm_gaudi_spec.runner.stages import EarlyStage
from vllm_gaudi_spec.runner.warmup import manifest

BLOCK, MAX_LEN, MAX_ROWS, BUDGET = 4, 64, 4, 20
NUM_DRAFTS = 3
MASK = VOCAB + 1
"""The mask token of the parallel drafter, which the target does not have."""
ROOMY, SCARCE = 120, 26
"""Numbers of KV blocks, including block 0: enough for all requests, and for one and a half of the longest."""
FAVORITES = list(range(10, 18))
"""The model's most frequent tokens. Texts repeat because of them, so that n-gram drafters are sometimes right."""
_HASHED = 1 << 20
_TARGET, _DRAFTER = "model.layers.0.attn", "draft_model.layers.0.attn"
_SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


class Reads:
    """The target, or a drafter that always agrees with it."""

    adapters = None
    carried_size = None
    group = SimpleNamespace(world_size=1)
    measuring = None
    output_ids = None
    rotary_offsets_R = None
    stage_sizes: Mapping[str, int] = MappingProxyType({})
    states = None
    reads_slices = True
    model = None
    """The module that a drafter of the user's may ask for."""
    ahead = 0
    """How far behind its position the token stands that is read there."""

    def __init__(self, layer: str, vllm_config: VllmConfig) -> None:
        self.layer_names = [layer]
        self.vllm_config = vllm_config
        self._size = vllm_config.model_config.get_hidden_size()

    def gather_adapters(self, rows_B: torch.Tensor, num_queries: int = 1) -> None:
        return None

    def kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return dict.fromkeys(self.layer_names, _SPEC)

    def encoder_kv_spec(self, block_size: int) -> dict[str, KVCacheSpec]:
        return {}

    def bind_kv(self, caches: dict[str, torch.Tensor], groups: list[list[str]]) -> None:
        (name,) = self.layer_names
        self._kv = caches[name]
        self._group = next(index for index, names in enumerate(groups) if name in names)

    def make_states(self, num_rows: int, num_snapshots: int, num_pending: int, device: torch.device) -> None:
        """No-op: this model keeps no states."""

    def check_kv_is_written(self) -> None:
        """No-op: reading KV that was not written changes the output."""

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        call, numbers_T = inputs.calls[self._group], self.number(inputs, carried_TH)
        self._kv.view(-1).index_copy_(0, inputs.slots[self._group], numbers_T)
        sums_BC = self._kv[call.block_table_BW.long()].flatten(1).cumsum(1)
        last_BQ = (call.starts_B[:, None] + torch.arange(call.num_queries)).clamp(max=sums_BC.shape[1] - 1).long()
        hidden = torch.zeros(len(inputs.token_ids_T), self._size)
        hidden[:, 0] = (sums_BC.gather(1, last_BQ) % _HASHED).flatten().float()
        hidden[:, 1], hidden[:, 2] = numbers_T.float(), inputs.positions_T.float()
        return Hidden(hidden)

    def number(self, inputs: Inputs, carried_TH: torch.Tensor | None) -> torch.Tensor:
        """Return what the KV slots keep."""
        return _number(inputs.token_ids_T, inputs.positions_T + self.ahead)

    def compute_row_logits(
        self, hidden_NH: torch.Tensor, num_real_B: torch.Tensor, adapters_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.logits(hidden_NH)

    def logits(self, hidden: torch.Tensor, adapters_N: torch.Tensor | None = None) -> torch.Tensor:
        return _logits(hidden[:, 0].long())


class Pipe:
    """A queue of the tensors that one stage sends to the next."""

    rank_in_group = 0

    def __init__(self, is_first_rank: bool, sent: deque[torch.Tensor]) -> None:
        self.is_first_rank = is_first_rank
        self.sent = sent

    def send(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.clone())

    def recv(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        received = self.sent.popleft()
        assert (received.shape, received.dtype) == (size, dtype)
        return received


class Continues(Reads):
    """The last stage of a target whose layers are all on the first stage."""

    def __init__(self, layer: str, vllm_config: VllmConfig) -> None:
        super().__init__(layer, vllm_config)
        self.stage_sizes = {"hidden_states": self._size}

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        assert carried_TH is not None
        super().forward(inputs)
        return Hidden(carried_TH)


class FillsBlocks(Reads):
    """A block drafter that agrees with the greedy target. Its KV slots are filled from the target's hidden states."""

    def write_context(self, inputs: Inputs, states_TH: torch.Tensor) -> None:
        self._kv.view(-1).index_copy_(0, inputs.slots[self._group], states_TH[:, 1].long())

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        call = inputs.calls[self._group]
        # Whoever reads later what a block writes here notices.
        self._kv.view(-1).index_copy_(0, inputs.slots[self._group], inputs.positions_T.long() + 12345)
        slots_BC = self._kv[call.block_table_BW.long()].flatten(1)
        is_context_BC = torch.arange(slots_BC.shape[1]) < call.starts_B[:, None]
        sum_B = torch.where(is_context_BC, slots_BC, 0).sum(1)
        token_B = inputs.token_ids_T.view(-1, call.num_queries)[:, 0]
        hidden_BQH = torch.zeros(len(token_B), call.num_queries, self._size)
        for place in range(1, call.num_queries):
            sum_B = (sum_B + _number(token_B, call.starts_B + place - 1)) % _HASHED
            hidden_BQH[:, place, 0] = sum_B.float()
            token_B = _logits(sum_B).argmax(1)
        return Hidden(hidden_BQH.flatten(0, 1))


class FillsMasks(Reads):
    """A parallel drafter that always agrees with the greedy target: it reads each mask token as the token that it
    predicts there."""

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        hidden, call = super().forward(inputs, carried_TH), inputs.call
        shape = call.num_rows, call.num_queries
        tokens_BQ, positions_BQ = inputs.token_ids_T.view(shape), inputs.positions_T.view(shape)
        sums_BQ, correction_B = hidden.last[:, 0].long().view(shape).clone(), torch.zeros(shape[0], dtype=torch.int64)
        for query in range(1, call.num_queries):
            predicted_B = _logits(sums_BQ[:, query - 1]).argmax(-1)
            position_B, is_mask_B = positions_BQ[:, query], tokens_BQ[:, query] == MASK
            difference_B = _number(predicted_B, position_B) - _number(tokens_BQ[:, query], position_B)
            correction_B += torch.where(is_mask_B, difference_B, 0)
            sums_BQ[:, query] = (sums_BQ[:, query] + correction_B) % _HASHED
        hidden.last[:, 0] = sums_BQ.flatten().float()
        return hidden


class ReadsStates(Reads):
    """A head that agrees with the target as long as it reads each token with the state of the token before it."""

    ahead = 1

    def make_proposer(self, context: DraftingContext) -> HeadProposer:
        return HeadProposer(self, make_head_translation(self, context.vocab_size))

    def number(self, inputs: Inputs, carried_TH: torch.Tensor | None) -> torch.Tensor:
        assert carried_TH is not None
        # The first slot has to keep the text before the first token that a head reads.
        return super().number(inputs, None) + torch.where(inputs.positions_T == 0, carried_TH[:, 0].long(), 0)

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        assert carried_TH is not None
        hidden_TH = super().forward(inputs, carried_TH).last
        sums_T = (carried_TH[:, 0].long() + super().number(inputs, None)) % _HASHED
        is_right_T = (sums_T == hidden_TH[:, 0]) | (inputs.token_ids_T == MASK)
        hidden_TH = torch.where(is_right_T[:, None], hidden_TH, hidden_TH + 1)
        return Hidden(hidden_TH, hidden_TH)


class HeadFillsMasks(ReadsStates):
    """A parallel head, which reads each mask token as the token that it predicts there."""

    def make_proposer(self, context: DraftingContext) -> HeadProposer:
        self._mask_state_H = torch.full((self._size,), 7.0)
        translation = make_head_translation(self, context.vocab_size)
        return ParallelHeadProposer(self, translation, MASK, self._mask_state_H)

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        hidden, call, is_mask_T = super().forward(inputs, carried_TH), inputs.call, inputs.token_ids_T == MASK
        if not is_mask_T.any():
            return hidden
        assert (carried_TH[is_mask_T] == self._mask_state_H).all()
        slots_BC = self._kv[call.block_table_BW.long()].flatten(1)
        is_context_BC = torch.arange(slots_BC.shape[1]) < call.starts_B[:, None]
        sum_B = torch.where(is_context_BC, slots_BC, 0).sum(1) % _HASHED
        for query in range(call.num_queries):
            sum_B = (sum_B + _number(_logits(sum_B).argmax(1), call.starts_B + 1 + query)) % _HASHED
            hidden.last.view(call.num_rows, call.num_queries, -1)[:, query, 0] = sum_B.float()
        return hidden


class ChainedLayers(ReadsStates):
    """Three layers of MTP. Layer j reads the token that stands 1 + j behind its position."""

    reads_slices = False

    def bind_kv(self, caches: dict[str, torch.Tensor], groups: list[list[str]]) -> None:
        super().bind_kv(caches, groups)
        self._layers = [copy(self) for _ in range(3)]
        for number, layer in enumerate(self._layers):
            layer.ahead, layer._kv = 1 + number, self._kv.clone()

    def make_proposer(self, context: DraftingContext) -> HeadProposer:
        layers = self._layers[: context.speculation.num_drafts]
        return ChainedProposer(layers, make_head_translation(self, context.vocab_size))


class Assists(ReadsStates):
    """An assistant of Gemma 4: it reads the target's KV, always up to the newest state's position."""

    def make_proposer(self, context: DraftingContext) -> HeadProposer:
        return AssistantProposer(self, make_head_translation(self, context.vocab_size))

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        assert carried_TH is not None
        call = inputs.calls[self._group]
        assert torch.equal(call.starts_B, inputs.positions_T)
        sums_BC = self._kv[call.block_table_BW.long()].flatten(1).cumsum(1) % _HASHED
        is_right_B = sums_BC.gather(1, call.starts_B[:, None].long())[:, 0] == carried_TH[:, 0]
        is_right_B |= carried_TH[:, 2] > call.starts_B  # the state is the assistant's own
        hidden_TH = carried_TH.clone()
        hidden_TH[:, 2] += 1
        numbers_T = _number(inputs.token_ids_T, hidden_TH[:, 2])
        hidden_TH[:, 0] = ((carried_TH[:, 0].long() + numbers_T) % _HASHED).float()
        hidden_TH = torch.where(is_right_B[:, None], hidden_TH, hidden_TH + 1)
        return Hidden(hidden_TH, hidden_TH)


class Remembers(Reads):
    """The same target with a recurrent layer, whose state is the sum over the text.

    The next token changes if that sum differs from the sum over the KV blocks.
    """

    states: RecurrentStates | None = None
    reads_slices = False

    def state_bytes(self, num_rows: int, num_pending: int) -> int:
        return num_rows

    def make_states(self, num_rows: int, num_snapshots: int, num_pending: int, device: torch.device) -> None:
        shape = LayerShape(1, 2, num_gates=0, state=(1,), dtype=torch.float32, state_dtype=torch.float32)
        self.states = RecurrentStates(
            [("sum", shape)], num_rows=num_rows + num_snapshots, num_pending=num_pending, device=device
        )

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        assert self.states is not None
        assert inputs.states is not None
        hidden, call = super().forward(inputs, carried_TH), inputs.states
        numbers_BQ1 = call.unflatten(_number(inputs.token_ids_T, inputs.positions_T).float()).unsqueeze(-1)
        only_itself = torch.tensor([[0.0, 1.0]])
        sums_BQ1 = self.states.by_layer["sum"].follow(call, numbers_BQ1, None, only_itself, None, _add_up)
        self.states.advance(call)
        is_same_T = hidden.last[:, 0] == call.flatten(sums_BQ1)[:, 0]
        return Hidden(torch.where(is_same_T[:, None], hidden.last, hidden.last + 1))


def _add_up(
    numbers_BQ1: torch.Tensor, gates: torch.Tensor | None, is_real_BQ: torch.Tensor, state_B1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    real_BQ1 = torch.where(is_real_BQ[..., None], numbers_BQ1, 0.0).long()
    sums_BQ1 = ((state_B1.long()[:, None] + real_BQ1.cumsum(1)) % _HASHED).float()
    return sums_BQ1, sums_BQ1[:, -1]


def _number(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    mixed = ((positions.long() + 1) * 2654435761) ^ ((tokens.long() + 1) * 40503)
    return (mixed ^ (mixed >> 13)) % _HASHED


def _logits(sums_N: torch.Tensor) -> torch.Tensor:
    """Return logits between 0 and 2, and between 0 and 8 for the favorites."""
    token_V = torch.arange(VOCAB)
    mixed = (sums_N[:, None] + 1) * (2 * token_V + 1) * 2246822519 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 2654435761 & 0xFFFFFFFF
    scale_V = torch.full((VOCAB,), 2.0)
    scale_V[FAVORITES] = 8.0
    return (mixed >> 8).float() / (1 << 24) * scale_V


def greedy_text(prompt: list[int], count: int) -> list[int]:
    """Return the model's next tokens, computed from the text alone."""
    text = list(prompt)
    for _ in range(count):
        numbers = _number(torch.tensor(text), torch.arange(len(text)))
        text.append(int(_logits(numbers.sum()[None] % _HASHED).argmax()))
    return text[len(prompt) :]


class Guesses:
    """A `custom_class` proposer that drafts a greedy row's next tokens, with occasional mistakes."""

    def __init__(self, vllm_config: Any) -> None:
        self._count = vllm_config.speculative_config.num_speculative_tokens

    def propose(
        self, sampled: list[list[int]], lengths_np: np.ndarray, tokens_np: np.ndarray, slot_mappings: Any = None
    ) -> list[list[int]]:
        return [self._guess(row[:length].tolist()) for row, length in zip(tokens_np, lengths_np, strict=True)]

    def _guess(self, text: list[int]) -> list[int]:
        drafts = greedy_text(text, self._count)
        if (wrong := sum(text) % (self._count + 2)) < self._count:
            drafts[wrong] = 2
        return drafts[: sum(text) % 7]


class _KVMemory(CopyingMemory):
    """Device memory with what else the runner asks for."""

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: object) -> dict[str, torch.Tensor]:
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        # Whoever reads what nobody wrote notices.
        return {name: torch.full((kv_cache_config.num_blocks, BLOCK), 12345) for name in names}

    def make_block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        return partial(copy_blocks, kv_caches)


def _small_backend(kind: type[HostBackend]) -> Any:
    backend: Any = kind()
    backend.memory = _KVMemory()
    backend.traits = replace(
        kind.traits,
        exact_context_width=True,
        block_size=BLOCK,
        prefill_rows=(1, 2),
        smallest_prefill=8,
        prefill_step=16,
        max_drafts=8,
    )
    return backend


@dataclass(frozen=True)
class Variant:
    method: str | None = None
    overlap: bool = False
    """Whether each step is scheduled before the previous one was read."""
    v2: bool = False
    """Which of vLLM's contracts applies to a resumed request."""
    num_blocks: int = SCARCE
    backend: type[HostBackend] = HostBackend
    adaptive: bool = False
    audit_every: int = 0
    num_snapshots: int = 0
    """Number of snapshots of the target's states; 0 if it has none."""
    short_lists: bool = False
    """Whether the user's bucket lists end before the largest batch and the longest chunk."""
    num_drafts: int = NUM_DRAFTS
    drafter_len: int | None = None
    """Maximum length of the drafter, if it is not the target's."""
    staged: bool = False
    """Whether the target has two pipeline stages."""
    rule: str = ""
    """An acceptance rule for probabilistic drafts, in place of the method's rule and drafts."""

    def __str__(self) -> str:
        parts = [self.method or "plain", "overlapping" if self.overlap else "one by one", "V2" if self.v2 else "V1"]
        traits = self.backend.traits
        graphs = "compiled" if traits.compiles else "captured" if traits.captures else ""
        states = [f"{self.num_snapshots} snapshots"] if self.num_snapshots else []
        states += ["two stages"] * self.staged
        return ", ".join([*parts, *([graphs] if graphs else []), *(["adaptive"] * self.adaptive), *states])


BLOCK_DRAFTER, RETOKENIZE, STANDARD, PARALLEL = "dflash", "retokenize", "standard", "parallel"
HEAD, PARALLEL_HEAD, CHAIN, ASSISTANT = "head", "parallel head", "chain", "assistant"
HEADS: dict[str | None, type[ReadsStates]] = {
    HEAD: ReadsStates,
    PARALLEL_HEAD: HeadFillsMasks,
    CHAIN: ChainedLayers,
    ASSISTANT: Assists,
}
_IN_TARGETS_BLOCKS = ("draft_model", STANDARD, PARALLEL, BLOCK_DRAFTER, HEAD, PARALLEL_HEAD, CHAIN)
# Options of a method besides its name; one that is missing needs none.
_SPECULATIVE: dict[str | None, dict[str, Any] | None] = {
    None: None,
    "custom_class": dict(model=f"{__name__}.Guesses"),
    "draft_model": dict(draft_sample_method="coupled", rejection_sample_method="strict"),
    PARALLEL: dict(
        method="draft_model", parallel_drafting=True, draft_sample_method="coupled", rejection_sample_method="strict"
    ),
    STANDARD: dict(method="draft_model", draft_sample_method="probabilistic", rejection_sample_method="standard"),
    "ngram": dict(prompt_lookup_min=1, prompt_lookup_max=3),
    "ngram_gpu": dict(prompt_lookup_min=1, prompt_lookup_max=3),
    # With tokens of its own, and so of another mind; it has a drafter KV region.
    RETOKENIZE: dict(method="universal_draft"),
    "suffix": dict(suffix_decoding_max_cached_requests=8),
    BLOCK_DRAFTER: {},
    **{name: dict(method="eagle", draft_sample_method="coupled", rejection_sample_method="strict") for name in HEADS},
}


_MANIFESTS: dict[Variant, Any] = {}


@dataclass
class Held:
    """Everything that the scheduler sent about an unfinished request: a model of the runner's state."""

    tokens: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)
    has_row: bool = True
    has_sampled: bool = False
    """Whether the request has sampled since it was admitted or resumed."""


class SmallEngine:
    """Runs steps like `EngineCore.step` and `step_with_batch_queue`, and checks each against `Held`."""

    def __init__(self, variant: Variant, folder: Path) -> None:
        self.variant = variant
        self.vllm_config, structured = _config(variant, folder)
        layers = [_TARGET, _DRAFTER] if variant.method in _IN_TARGETS_BLOCKS else [_TARGET]
        kv_cache = KVCacheConfig(variant.num_blocks, [], [KVCacheGroupSpec(layers, _SPEC)])
        scheduler_class: Any = self.vllm_config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler_class(self.vllm_config, kv_cache, structured, block_size=BLOCK, log_stats=True)
        self.scheduler.use_v2_model_runner = variant.v2
        if (step_times := self.scheduler._step_times) is not None:
            # Measured times would choose the same numbers of drafts for long.
            rng = random.Random(0)
            step_times.choose = lambda *args, **kwargs: rng.choice(step_times._choices)
        self.runner = ModelRunner(self.vllm_config, _small_backend(variant.backend), shows_progress=False)
        target = Remembers if variant.num_snapshots else Continues if variant.staged else Reads
        self.runner.target = target(_TARGET, self.vllm_config)
        self.early: EarlyStage | None = None
        if variant.staged:
            self.early = self._make_early_stage(kv_cache)
        if variant.num_snapshots:
            self.scheduler.keep_snapshots(variant.num_snapshots)
            self.runner.num_snapshots = variant.num_snapshots
        drafter = ({BLOCK_DRAFTER: FillsBlocks, PARALLEL: FillsMasks} | HEADS).get(variant.method, Reads)
        has_model = variant.method in (*_IN_TARGETS_BLOCKS, RETOKENIZE, ASSISTANT)
        layer = _TARGET if variant.method == ASSISTANT else _DRAFTER
        self.runner.drafter = drafter(layer, self.vllm_config) if has_model else None
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadProposer, "build", lambda context: context.drafter.make_proposer(context))
            self.runner.initialize_kv_cache(kv_cache)
        if variant not in _MANIFESTS:
            _MANIFESTS[variant] = manifest(self.runner)
        self.runner.recorder.expect(_MANIFESTS[variant])
        self.runner.hidden_states.put = partial(self._put_once, self.runner.hidden_states.put)
        self.texts: dict[str, list[int]] = {}
        """Tokens sent to each request's client."""
        self.ended: set[str] = set()
        self.held: dict[str, Held] = {}
        self.counts = Counter[tuple[str, str]]()
        """Our metrics by name and label."""
        self.num_steps = self.num_preempted = self.num_accepted = self.num_verified = 0
        self.num_loaded = self.num_resumed = 0
        """Number of requests that started from a snapshot, and of those that had been preempted."""
        self._in_flight: deque[tuple[SpecSchedulerOutput, Any, dict[str, Held]]] = deque()
        self._depth = 2 if variant.overlap or variant.staged else 1

    def _make_early_stage(self, kv_cache: KVCacheConfig) -> EarlyStage:
        self.scheduler.use_pp = True
        early, sent = EarlyStage(self.vllm_config, _small_backend(self.variant.backend), shows_progress=False), deque()
        early.target, early.drafter = Reads(_TARGET, self.vllm_config), None
        early.target.stages, self.runner.target.stages = Pipe(True, sent), Pipe(False, sent)
        with torch.inference_mode():
            early.initialize_kv_cache(kv_cache)
        early.recorder.expect(manifest(early))
        return early

    def _put_once(self, put: Callable[..., None], phase: str, queries: int, rows_B: torch.Tensor, *rest: Any) -> None:
        """Store hidden states, after a check that no row has two: the order of writes is undefined on a card."""
        used = [row for row in rows_B.tolist() if row != self.runner.requests.pad_row]
        assert len(set(used)) == len(used)
        put(phase, queries, rows_B, *rest)

    # --- what a front end does ---

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        hasher = get_request_block_hasher(BLOCK, sha256, *hash_options(self.scheduler))
        self.scheduler.add_request(Request(name, list(prompt), params, None, block_hasher=hasher))
        self.texts[name] = []

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.ended.add(name)

    def interrupt(self) -> None:
        """Preempt every running request and clear the prefix cache."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    @property
    def running(self) -> list[str]:
        return [name for name in self.texts if name not in self.ended]

    # --- a step ---

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            with torch.inference_mode():
                result = self._execute(scheduled)
            members = {name: self.held[name] for name in scheduled.num_scheduled_tokens}
            self._in_flight.append((scheduled, result, members))
            if len(self._in_flight) < self._depth and scheduled.total_num_scheduled_tokens:
                return
        if not self._in_flight:
            return
        scheduled, result, members = self._in_flight.popleft()
        output = result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result
        self._observe_tokens(output, members)
        parts = self.scheduler.update_from_output(scheduled, output).values()
        for part in parts:
            for name, figures in getattr(part.scheduler_stats, "gaudi_spec", {}).items():
                self.counts.update({(name, value): number for value, number in figures.items()})
        for sent in (sent for part in parts for sent in part.outputs):
            self.texts[sent.request_id] += sent.new_token_ids
            if sent.finish_reason is not None:
                self.ended.add(sent.request_id)
        self._check_tokens()

    def finish(self) -> None:
        """Run until nothing is left to do, and check that no state is left."""
        for _ in range(5000):
            if not (self.scheduler.has_requests() or self._in_flight):
                break
            self.step()
        assert not self.running, f"{self.running} never end"
        in_use = self.runner.step_report()["in_use"]
        assert not any(in_use.values()), in_use
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.variant.num_blocks - 1
        assert not self.scheduler.requests
        acceptance = self.scheduler._acceptance
        assert acceptance is None or not acceptance._by_id
        assert bool(self.runner.recorder.unexpected) == self.variant.short_lists
        if self.early is not None:
            assert not self.early.recorder.unexpected
            assert not any(self.early.step_report()["in_use"].values())

    def _execute(self, scheduled: SpecSchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        self.num_steps += 1
        self.num_preempted += len(scheduled.preempted_req_ids or ())
        self.num_loaded += len(scheduled.state_loads)
        self.num_resumed += sum(name in self.held for name in scheduled.state_loads)
        self._observe_schedule(scheduled)
        if self.early is not None and self.early.execute_model(scheduled) is None:
            assert self.early.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT
        result = self.runner.execute_model(scheduled)
        self._check_rows()
        return self.runner.sample_tokens(None) if result is None else result

    # --- the model of the runner's state ---

    def _observe_schedule(self, scheduled: SpecSchedulerOutput) -> None:
        held = self.held
        for name in scheduled.finished_req_ids:
            held.pop(name, None)
        for name in scheduled.preempted_req_ids or ():
            if name in held:
                held[name].has_row = False
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            held[new.req_id] = Held(list(tokens), new.num_computed_tokens, list(new.block_ids[0]))
        cached = scheduled.scheduled_cached_reqs
        for name, num_computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if name in cached.resumed_req_ids:
                held[name] = Held(list(cached.all_token_ids[name]), num_computed)
            held[name].num_computed = num_computed
            held[name].blocks += blocks[0] if blocks is not None else []
        for name, count in scheduled.num_scheduled_tokens.items():
            held[name].num_computed += count

    def _observe_tokens(self, output: ModelRunnerOutput, members: dict[str, Held]) -> None:
        real: dict[str, int] = getattr(output, "num_real_drafts", {})
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            members[name].tokens += tokens
            if tokens:
                if hasattr(output, "started"):
                    assert (name in output.started) != members[name].has_sampled
                members[name].has_sampled = True
                self.num_accepted += len(tokens) - 1
                self.num_verified += real.get(name, 0)
                assert 0 <= len(tokens) - 1 <= real.get(name, 0) <= self.variant.num_drafts

    def _check_rows(self) -> None:
        """Check after a forward which request has which row and blocks."""
        requests = self.runner.requests
        rows = {name: requests.by_id[name].row for name in self.held if name in requests.by_id}
        assert rows.keys() == self.held.keys() == requests.by_id.keys()
        taken = [rows[name] for name, held in self.held.items() if held.has_row]
        assert {rows[name] for name, held in self.held.items() if not held.has_row} <= {-1}
        assert sorted([*taken, *requests._free_rows]) == list(range(MAX_ROWS)), "each row has one request, or none"
        for name, held in self.held.items():
            if held.has_row:
                table = requests.tables_np[0][rows[name]].tolist()
                assert table == [*held.blocks, *[0] * (len(table) - len(held.blocks))], name

    def _check_tokens(self) -> None:
        """Check a row's tokens. The device may have more of them than were reported."""
        requests = self.runner.requests
        rows = {name: requests.by_id[name].row for name, held in self.held.items() if held.has_row}
        for name, row in rows.items():
            tokens = self.held[name].tokens
            assert requests.history_RM[row, : len(tokens)].tolist() == tokens, name
        if self._in_flight:
            return
        for name, row in rows.items():
            held, request = self.held[name], requests.by_id[name]
            assert requests.computed_R[row] == min(held.num_computed, len(held.tokens) - 1), name
            longest = min(MAX_LEN, request.num_prompt + request.params.max_tokens) - 1
            waiting = int(requests.num_drafts_R[row])
            assert waiting == 0 or len(held.tokens) + waiting <= longest, "no draft that nobody has a use for"
            if (history := getattr(self.runner.drafting, "_history", None)) is not None:
                assert history.get_tokens(row).tolist() == held.tokens, name


@cache
def _config(variant: Variant, folder: Path) -> tuple[VllmConfig, StructuredOutputManager]:
    upstream.apply()
    init_none_hash(sha256)
    byte_tokenizer().save_pretrained(folder)
    speculative, options = _SPECULATIVE.get(variant.method, {}), {}
    if speculative is not None:
        speculative = dict(method=variant.method, num_speculative_tokens=variant.num_drafts) | speculative
        speculative["enable_adaptive_verification"] = variant.adaptive
        speculative["max_model_len"] = variant.drafter_len
        if variant.rule:
            speculative |= dict(draft_sample_method="probabilistic", rejection_sample_method=variant.rule)
        if variant.method in ("draft_model", STANDARD, *HEADS):
            speculative["model"] = str(folder)
        if variant.method == BLOCK_DRAFTER:
            speculative["model"] = save_block_drafter(folder / "block-drafter", "DFlashDraftModel")
        if variant.method == PARALLEL:
            speculative["model"] = str(folder / PARALLEL)
            drafter_config = LlamaConfig(**common(vocab_size=MASK + 1), pard_token=MASK)
            drafter_config.architectures = ["LlamaForCausalLM"]
            drafter_config.save_pretrained(folder / PARALLEL)
            byte_tokenizer().save_pretrained(folder / PARALLEL)
        if variant.method == RETOKENIZE:
            speculative["model"] = str(folder / "drafter")
            engine_config(folder / "drafter", None)
            byte_tokenizer(300).save_pretrained(folder / "drafter")
            options = dict(universal_context=RETOKENIZE, universal_kv_len=48)
    if variant.short_lists:
        options |= dict(batch_buckets=[1, 2], prefill_buckets=[8])
    made = engine_config(
        folder,
        speculative,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=BUDGET,
        async_scheduling=variant.overlap,
        additional_config={"gaudi_spec": {"audit_every": variant.audit_every, **options}},
    )
    assert made.scheduler_config.async_scheduling == variant.overlap
    made.cache_config.num_gpu_blocks = variant.num_blocks
    made.cache_config.kv_cache_layout = "NHD"
    return made, StructuredOutputManager(made)
