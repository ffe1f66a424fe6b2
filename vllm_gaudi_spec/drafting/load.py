"""Builds drafting from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm_gaudi_spec.config import SLEM, TLI
from vllm_gaudi_spec.drafting.choice import DraftChoice, DraftProbs
from vllm_gaudi_spec.drafting.custom import CustomProposer
from vllm_gaudi_spec.drafting.draft_model import AutoregressiveProposer, DraftModelKVSync
from vllm_gaudi_spec.drafting.guard import Guard, make_agreement_check
from vllm_gaudi_spec.drafting.head import HeadKVSync, StateKVSync
from vllm_gaudi_spec.drafting.history import RequestHistory
from vllm_gaudi_spec.drafting.kv_sync import DrafterKVSync, ReadBlocks
from vllm_gaudi_spec.drafting.memory import DrafterKVRegion
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting
from vllm_gaudi_spec.drafting.on_host import HostDrafting
from vllm_gaudi_spec.drafting.proposers import ProposerContext, build_proposer
from vllm_gaudi_spec.drafting.universal.pairs import Coverage, Pair, Texts
from vllm_gaudi_spec.drafting.universal.text_drafting import RetokenizedProposer, TextDrafting
from vllm_gaudi_spec.environment import cache_folder
from vllm_gaudi_spec.scheduling.limits import LengthSplit

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.base import DeviceProposer, Drafting, DraftingContext, HostProposer
    from vllm_gaudi_spec.runner.model import LoadedModel


def load_drafting(context: DraftingContext) -> Drafting:
    """Build the drafting that the configuration names."""
    speculation = context.speculation
    pair = Pair.load(context.vllm_config, cache_folder()) if speculation.universal else None
    if pair is not None:
        context.recorder.coverage = pair.map.compute_coverage()
    if speculation.retokenizes:
        assert pair is not None
        return _text_drafting(context, pair)
    proposer = build_proposer(
        ProposerContext(
            speculation=speculation,
            vllm_config=context.vllm_config,
            device=context.device,
            model=context.drafter,
            pair=pair,
        )
    )
    if speculation.on_device:
        return _device_drafting(context, cast("DeviceProposer", proposer), pair)
    return _host_drafting(context, cast("HostProposer", proposer))


def _device_drafting(context: DraftingContext, proposer: DeviceProposer, pair: Pair | None) -> DeviceDrafting:
    limits = _limits(context)
    choice = DraftChoice(context.speculation, context.requests.backend.rules, context.sampling)
    return DeviceDrafting(
        proposer=proposer,
        split=limits,
        requests=context.requests,
        recorder=context.recorder,
        shapes=context.shapes,
        num_drafts=context.speculation.num_drafts,
        choice=choice,
        draft_probs=_draft_probs(context),
        guard=make_guard(context.target, context.drafter),
        kv_sync=_kv_sync(context, proposer, limits),
        coverage=_coverage(context, pair),
    )


def _kv_sync(context: DraftingContext, proposer: DeviceProposer, limits: LengthSplit) -> DrafterKVSync:
    speculation, drafter = context.speculation, context.drafter
    max_len = min(speculation.drafter_max_len or context.max_model_len, context.max_model_len)
    if drafter is not None and speculation.is_head:
        config = context.vllm_config.speculative_config
        assert config is not None
        return HeadKVSync(
            head=drafter,
            hidden_states=context.hidden_states,
            requests=context.requests,
            recorder=context.recorder,
            shapes=context.shapes,
            split=limits,
            blocks=_read_blocks(context, drafter, keeps_up=True),
            head_size=config.draft_model_config.get_hidden_size(),
            max_len=max_len,
        )
    if speculation.reads_states:
        return StateKVSync(context.hidden_states)
    if drafter is not None:
        return DraftModelKVSync(
            cast(AutoregressiveProposer, proposer).read,
            context.requests,
            context.recorder,
            context.shapes,
            max_len,
            speculation.num_drafts,
            _read_blocks(context, drafter, keeps_up=False),
        )
    return DrafterKVSync()


def _read_blocks(context: DraftingContext, drafter: LoadedModel, *, keeps_up: bool) -> ReadBlocks:
    names = set(drafter.layer_names)
    groups = [index for index, layers in enumerate(context.kv_cache.layer_groups) if names & set(layers)]
    return ReadBlocks(context.requests, context.kv_cache.num_blocks, groups, keeps_up=keeps_up)


def _text_drafting(context: DraftingContext, pair: Pair) -> TextDrafting:
    speculation, requests, drafter = context.speculation, context.requests, context.drafter
    assert drafter is not None
    texts, rewrites = Texts.load(pair), speculation.universal_match == SLEM
    shapes = context.shapes.change_length(speculation.universal_kv_len, requests.backend)
    translation = (
        texts.make_drafter_vocabulary(context.device) if rewrites else pair.make_mapped_vocabulary(context.device)
    )
    length, max_context = speculation.universal_kv_len, shapes.max_context
    return TextDrafting(
        proposer=RetokenizedProposer(drafter, translation),
        reader=texts.make_reader(),
        rewriter=texts.make_rewriter() if rewrites else None,
        kv_region=DrafterKVRegion(drafter, requests.backend, context.max_rows, length, max_context),
        history=RequestHistory(_limits(context), requests, speculation.num_drafts),
        requests=requests,
        recorder=context.recorder,
        shapes=shapes,
        choice=DraftChoice(speculation, requests.backend.rules, context.sampling),
        draft_probs=_draft_probs(context),
        num_drafts=speculation.num_drafts,
        guard=make_guard(context.target, drafter),
        coverage=_coverage(context, pair),
    )


def _host_drafting(context: DraftingContext, proposer: HostProposer) -> HostDrafting:
    if isinstance(proposer, CustomProposer):
        proposer.load_model(context.target.model)
    history = RequestHistory(_limits(context), context.requests, context.speculation.num_drafts)
    return HostDrafting(proposer, history, context.vocab_size, make_agreement_check(context.vllm_config))


# --- parts of several kinds ---


def _limits(context: DraftingContext) -> LengthSplit:
    return LengthSplit(context.requests.backend, context.max_rows, context.speculation, context.max_model_len)


def _draft_probs(context: DraftingContext) -> DraftProbs:
    return DraftProbs(context.speculation, context.max_rows, context.vocab_size, context.device)


def _coverage(context: DraftingContext, pair: Pair | None) -> Coverage | None:
    if pair is None or context.speculation.universal_match != TLI:
        return None
    return Coverage(pair.map.target_to_draft)


def make_guard(target: LoadedModel, drafter: LoadedModel | None) -> Guard:
    """Return the guard of a drafter on the device. Data-parallel ranks draft independently of each other."""
    same_ranks = drafter is None or drafter.group is target.group
    return Guard(independent=target.group.world_size == 1, replicas=None if same_ranks else target.group)
