"""When and for whom the drafter runs: on the device between two steps, or on the host behind a step's one read.

Both kinds leave their drafts behind the rows' last tokens, where the next step finds them, and tell vLLM's scheduler
what it may schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

from vllm.config import replace
from vllm.distributed import get_pp_group

from vllm_gaudi_spec.config import SLEM, TLI, UnsupportedConfigError
from vllm_gaudi_spec.drafting.base import DeviceProposer, HostProposer
from vllm_gaudi_spec.drafting.choice import DraftChoice, DraftLaws
from vllm_gaudi_spec.drafting.custom import CustomProposer
from vllm_gaudi_spec.drafting.draft_model import AutoregressiveProposer
from vllm_gaudi_spec.drafting.drafter_state import DrafterState
from vllm_gaudi_spec.drafting.followed import Followed
from vllm_gaudi_spec.drafting.guard import Guard, agreement
from vllm_gaudi_spec.drafting.head_reading import HeadReading, LastState
from vllm_gaudi_spec.drafting.heads import load_head
from vllm_gaudi_spec.drafting.limits import LengthSplit
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting
from vllm_gaudi_spec.drafting.on_host import HostDrafting
from vllm_gaudi_spec.drafting.proposers import ProposerContext, build_proposer
from vllm_gaudi_spec.drafting.read_blocks import ReadBlocks
from vllm_gaudi_spec.drafting.reading import Reading
from vllm_gaudi_spec.drafting.universal.coverage import Coverage
from vllm_gaudi_spec.drafting.universal.pairs import Pair, Texts
from vllm_gaudi_spec.drafting.universal.retokenized import RetokenizedProposer
from vllm_gaudi_spec.drafting.universal.slab import Slab
from vllm_gaudi_spec.drafting.universal.text_drafting import TextDrafting
from vllm_gaudi_spec.environment import cache_folder
from vllm_gaudi_spec.quantization.models import Quantization
from vllm_gaudi_spec.records import Drafts
from vllm_gaudi_spec.runner.model import LoadedModel

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed import GroupCoordinator
    from vllm.v1.outputs import DraftTokenIds

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Batch, DraftRound, Request, SampleBatch, StepResult
    from vllm_gaudi_spec.runner.graphs import StepRecorder
    from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
    from vllm_gaudi_spec.runner.kv_cache import KVCache
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes
    from vllm_gaudi_spec.sampling.params import Branch, Sampling, SamplingInputs


Draft = Callable[["SampleBatch", "torch.Tensor", "SamplingInputs"], object]
"""A round of drafts on padding, for warm-up: of a batch, the tokens that each row has, and a sampling pass's inputs."""


class Drafting(Protocol):
    def apply(self, requests: Requests) -> None:
        """Requests came and went, in `requests.admitted` and `requests.ended`."""
        ...

    def hear(self, again: list[Request], never: list[Request], *, is_off: bool) -> None:
        """The scheduler's word about faults, as `Word` has it. With `is_off` the scheduler asks for no drafts any more:
        drafters behind a step's read need no more than that. On the device steps that are in flight, and what is read
        without drafts, have to be told."""
        ...

    def take_rounds(self) -> list[DraftRound]:
        """What the host has seen of the drafter since it was last asked."""
        ...

    def outgrown(self) -> Collection[str]:
        """Requests that had no drafts behind the newest step because their text is too long, by what the drafter alone
        knows."""
        ...

    def most(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        """The most drafts that the device may have for each request, of those that were scheduled."""
        ...

    def follow(self, batch: Batch) -> None:
        """A batch that the target has computed."""
        ...

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        """float32 [B, K, V]: the laws of the rows' drafts, where drafting is probabilistic."""
        ...

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """A part of the sampling pass, on the device, whether drafts follow or not: rows have so many tokens now."""
        ...

    def propose(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, most: int) -> Drafts | None:
        """On the device, after the verification. `lengths_B`: tokens of each row; `most` drafts a row at most."""
        ...

    def propose_behind(self, step: StepResult, most: int) -> None:
        """Behind the read of a step, on the host."""
        ...

    def drafts_of(self, step: StepResult) -> DraftTokenIds:
        """What was drafted behind a step that lies on the host."""
        ...

    def in_use(self) -> dict[str, int]:
        """What it remembers of requests that have not ended, by what that is."""
        ...

    # --- warm-up ---

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        """Everything that the device may be asked for."""
        ...

    def rounds(self, sampling: Sampling) -> Iterator[tuple[int, Branch, Draft]]:
        """Every round of drafts: its rows, its branch, and how it is run."""
        ...

    def no_drafts(self, num_rows: int) -> Drafts | None:
        """What `propose` answers of padding; None if it never answers."""
        ...

    def warm_up(self) -> None:
        """Run what is no round: changes of the drafter's state."""
        ...


def load_drafter(
    speculation: Speculation, vllm_config: VllmConfig, backend: DeviceBackend, target: LoadedModel
) -> LoadedModel | None:
    """The drafter's model, if the method has one: loaded beside the target, so that its layers join the KV cache."""
    if not speculation.has_model:
        return None
    group = _group_of_drafter(vllm_config, target)
    try:
        if speculation.reads_states:
            return load_head(speculation.method, vllm_config, backend, target, group)
        quantization = Quantization.of_drafter(vllm_config, target.model)
        return LoadedModel(
            draft_config(vllm_config), backend, prefix="draft_model", quantization=quantization, group=group
        )
    except UnsupportedConfigError:
        raise
    except Exception as error:
        given = vllm_config.speculative_config
        assert given is not None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedConfigError(
            f"The drafter {given.draft_model_config.model} can not be loaded: {reason}. Is its checkpoint whole, and "
            "for this target? Give another model in --speculative-config."
        ) from error


def _group_of_drafter(vllm_config: VllmConfig, target: LoadedModel) -> GroupCoordinator:
    """The target's ranks, or this one alone: with `draft_tensor_parallel_size` 1 each rank runs the whole drafter."""
    given = vllm_config.speculative_config
    assert given is not None
    if given.draft_parallel_config.tensor_parallel_size == target.group.world_size:
        return target.group
    alone = get_pp_group()  # a pipeline has one stage here, so nobody else is in its group
    assert alone.world_size == 1
    return alone


def guard_of(target: LoadedModel, drafter: LoadedModel | None) -> Guard:
    """Data-parallel ranks draft each for itself: of them none waits for another here."""
    cut_alike = drafter is None or drafter.group is target.group
    return Guard(alone=target.group.world_size == 1, apart=None if cut_alike else target.group)


def draft_config(vllm_config: VllmConfig) -> VllmConfig:
    """vLLM's configuration as it is for the drafter's model."""
    given = vllm_config.speculative_config
    assert given is not None
    parallel = replace(given.draft_parallel_config, rank=vllm_config.parallel_config.rank)
    own = replace(
        vllm_config,
        quant_config=None,  # the drafter's own is found with its weights
        model_config=given.draft_model_config,
        parallel_config=parallel,
        load_config=given.draft_load_config or vllm_config.load_config,
    )
    return given.apply_draft_overrides(own)


def load_drafting(
    speculation: Speculation,
    vllm_config: VllmConfig,
    requests: Requests,
    recorder: StepRecorder,
    shapes: Shapes,
    kv_cache: KVCache,
    hidden_states: HiddenStateBuffer,
    target_model: LoadedModel,
    model: LoadedModel | None,
) -> Drafting:
    """The drafter that the configuration names."""
    target, device = vllm_config.model_config, requests.backend.torch_device
    split = LengthSplit(requests.backend, requests.pad_row, speculation, target.max_model_len)
    laws = DraftLaws(speculation, requests.pad_row, target.get_vocab_size(), device)
    guard = guard_of(target_model, model)
    pair = coverage = None
    if speculation.universal:
        pair = Pair.load(vllm_config, cache_folder())
        recorder.coverage = pair.map.coverage()
        coverage = Coverage(pair.map.target_to_draft) if speculation.universal_match == TLI else None
    if speculation.retokenizes:
        assert pair is not None
        assert model is not None
        texts = Texts.load(pair)
        rewrites = speculation.universal_match == SLEM
        own_shapes = shapes.of_length(speculation.universal_slab, requests.backend)
        return TextDrafting(
            RetokenizedProposer(model, texts.own(device) if rewrites else pair.mapped(device)),
            texts.reader(),
            texts.rewriter() if rewrites else None,
            Slab(model, requests.backend, requests.pad_row, speculation.universal_slab, own_shapes.max_context),
            Followed(split, requests, speculation.num_drafts),
            requests,
            recorder,
            own_shapes,
            DraftChoice(speculation, requests.backend.rules),
            laws,
            speculation.num_drafts,
            guard,
            coverage,
        )
    context = ProposerContext(speculation=speculation, vllm_config=vllm_config, device=device, model=model, pair=pair)
    proposer = build_proposer(context)
    if speculation.on_device:
        longest = min(speculation.drafter_max_len or target.max_model_len, target.max_model_len)
        reading = Reading()
        own = set() if model is None else set(model.layer_names)
        groups = [index for index, names in enumerate(kv_cache.layer_groups) if set(names) & own]
        if speculation.is_head and model is not None:
            size = context.spec_config.draft_model_config.get_hidden_size()
            blocks = ReadBlocks(requests, kv_cache.num_blocks, groups, keeps_up=True)
            reading = HeadReading(model, hidden_states, requests, recorder, shapes, split, blocks, size, longest)
        elif speculation.reads_states:
            reading = LastState(hidden_states)
        elif model is not None:
            blocks = ReadBlocks(requests, kv_cache.num_blocks, groups)
            read = cast(AutoregressiveProposer, proposer).read
            reading = DrafterState(read, requests, recorder, shapes, longest, speculation.num_drafts, blocks)
        return DeviceDrafting(
            cast(DeviceProposer, proposer),
            split,
            requests,
            recorder,
            shapes,
            speculation,
            laws,
            guard,
            reading,
            coverage,
        )
    if isinstance(proposer, CustomProposer):
        proposer.load_model(target_model.model)
    followed = Followed(split, requests, speculation.num_drafts)
    return HostDrafting(cast(HostProposer, proposer), followed, target.get_vocab_size(), agreement(vllm_config))
