"""Creates the `Drafting` object that the configuration selects."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import SLEM
from vllm_gaudi_spec.drafting.guard import Guard, make_agreement_check
from vllm_gaudi_spec.drafting.history import RequestHistory
from vllm_gaudi_spec.drafting.memory import DrafterKVRegion
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting, DeviceRowLimits
from vllm_gaudi_spec.drafting.on_host import HostDrafting
from vllm_gaudi_spec.drafting.universal.encoder import Encoder
from vllm_gaudi_spec.drafting.universal.pairs import Pair
from vllm_gaudi_spec.drafting.universal.text_drafting import RetokenizedProposer, TextDrafting
from vllm_gaudi_spec.drafting.universal.timeline import Reader, Rewriter
from vllm_gaudi_spec.drafting.universal.token_bytes import read_vocabulary
from vllm_gaudi_spec.drafting.vocabulary import DrafterVocabulary
from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.scheduling.limits import RowLimits

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.base import DeviceProposer, Drafting, DraftingContext, HostProposer
    from vllm_gaudi_spec.model import LoadedModel


def load_drafting(context: DraftingContext) -> Drafting:
    """Create the `Drafting` object that the configuration selects."""
    speculation = context.speculation
    pair = Pair.load(context.vllm_config) if speculation.universal else None
    if pair is not None:
        context.recorder.coverage = pair.map.compute_coverage()
        context = replace(context, pair=pair)
    if speculation.retokenizes:
        assert pair is not None
        return _make_text_drafting(context, pair)
    method = METHODS[speculation.method]
    parallel_proposer = context.spec_config.parallel_drafting and method.parallel_proposer
    module, name = (parallel_proposer or method.proposer).split(".")
    proposer: Any = getattr(import_module(f"{__package__}.{module}"), name).build(context)
    return _make_device_drafting(context, proposer) if speculation.on_device else _make_host_drafting(context, proposer)


def _make_device_drafting(context: DraftingContext, proposer: DeviceProposer) -> DeviceDrafting:
    backend = context.requests.backend
    row_limits = DeviceRowLimits(backend, context.max_rows, context.speculation, context.max_model_len)
    return DeviceDrafting(
        context,
        proposer=proposer,
        row_limits=row_limits,
        guard=make_guard(context.target, context.drafter),
        kv_sync=proposer.make_kv_sync(context, row_limits),
    )


def _make_text_drafting(context: DraftingContext, pair: Pair) -> TextDrafting:
    speculation, requests, drafter, vocab_map = context.speculation, context.requests, context.drafter, pair.map
    assert drafter is not None
    of_target, of_drafter = read_vocabulary(pair.target), read_vocabulary(pair.drafter)
    rewriter, translation = None, None
    if speculation.universal_match == SLEM:
        target_encoder = Encoder(pair.target, len(vocab_map.target_to_draft))
        rewriter = Rewriter(of_target, of_drafter, target_encoder, vocab_map.draft_to_target)
        # Tokens that represent text may be drafted, and so may special tokens that are matched by role.
        draftable = vocab_map.draftable.copy()
        spelled = [token for token, piece in enumerate(of_drafter.bytes_by_id[: len(draftable)]) if piece is not None]
        draftable[spelled] = True
        translation = DrafterVocabulary(draftable, context.device)
    drafter_encoder = Encoder(pair.drafter, len(vocab_map.draft_to_target))
    shapes = context.shapes.change_length(speculation.universal_kv_len, requests.backend)
    length, max_context = speculation.universal_kv_len, shapes.max_context
    return TextDrafting(
        replace(context, shapes=shapes),
        proposer=RetokenizedProposer(drafter, translation or pair.make_mapped_vocabulary(context.device)),
        reader=Reader(of_target, of_drafter, drafter_encoder, vocab_map.target_to_draft),
        rewriter=rewriter,
        kv_region=DrafterKVRegion(drafter, requests.backend, context.max_rows, length, max_context),
        guard=make_guard(context.target, drafter),
    )


def _make_host_drafting(context: DraftingContext, proposer: HostProposer) -> HostDrafting:
    row_limits = RowLimits(context.max_rows, context.speculation, context.max_model_len)
    history = RequestHistory(row_limits, context.requests, context.speculation.num_drafts)
    return HostDrafting(proposer, history, context.vocab_size, make_agreement_check(context.vllm_config))


def make_guard(target: LoadedModel, drafter: LoadedModel | None) -> Guard:
    """Return the guard for a device drafter. Data-parallel ranks draft independently of each other."""
    same_ranks = drafter is None or drafter.group is target.group
    return Guard(independent=target.group.world_size == 1, replicas=None if same_ranks else target.group)
