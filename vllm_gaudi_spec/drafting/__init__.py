"""Drafters: one a file, found by vLLM's name of the method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_spec.config import HEAD_METHODS, MEDUSA

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.drafting.base import DeviceProposer, HostProposer, Model
    from vllm_gaudi_spec.drafting.universal.pairs import Pair
    from vllm_gaudi_spec.drafting.vocabulary import Translation


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drafter is built for."""

    speculation: Speculation
    vllm_config: VllmConfig
    device: torch.device
    model: Model | None
    """The drafter's own, for methods that have one."""
    pair: Pair | None
    """The two vocabularies, where the drafter has one of its own."""

    @property
    def given(self) -> SpeculativeConfig:
        assert self.vllm_config.speculative_config is not None
        return self.vllm_config.speculative_config

    @property
    def vocab_size(self) -> int:
        size: int = self.vllm_config.model_config.get_vocab_size()
        return size


class _Method(NamedTuple):
    where: str
    """Module and class; imported only when it is picked."""
    arguments: Callable[[Setting], dict[str, Any]]


def _ngram(setting: Setting) -> dict[str, Any]:
    return {"min_ngram": setting.given.prompt_lookup_min, "max_ngram": setting.given.prompt_lookup_max}


def _suffix(setting: Setting) -> dict[str, Any]:
    names = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    return {name: getattr(setting.given, f"suffix_decoding_{name}") for name in names}


def _custom(setting: Setting) -> dict[str, Any]:
    return {"vllm_config": setting.vllm_config}


def _draft_model(setting: Setting) -> dict[str, Any]:
    from vllm_gaudi_spec.drafting.universal.pairs import same_tokens

    if setting.pair is not None:
        translation: Translation = setting.pair.mapped(setting.device)
    else:
        translation = same_tokens(setting.vllm_config)
    return {"model": setting.model, "translation": translation}


def _head(setting: Setting) -> dict[str, Any]:
    return {"model": setting.model, "translation": _of_head(setting)}


def _of_head(setting: Setting) -> Translation:
    """A head reads the target's tokens, and may say fewer."""
    from vllm_gaudi_spec.drafting.vocabulary import FewerTokens, SameTokens

    assert setting.model is not None
    said = setting.model.said
    return SameTokens(setting.vocab_size, setting.vocab_size) if said is None else FewerTokens(said, setting.vocab_size)


_METHODS = {
    "ngram": _Method("ngram.NgramProposer", _ngram),
    "ngram_gpu": _Method("ngram.DeviceNgramProposer", _ngram),
    "suffix": _Method("suffix.SuffixProposer", _suffix),
    "custom_class": _Method("custom.CustomProposer", _custom),
    "draft_model": _Method("draft_model.AutoregressiveProposer", _draft_model),
    **dict.fromkeys(HEAD_METHODS, _Method("head.HeadProposer", _head)),
    MEDUSA: _Method("medusa.MedusaProposer", _head),
}


def build_proposer(setting: Setting) -> HostProposer | DeviceProposer:
    method = _METHODS[setting.speculation.method]
    module, name = method.where.split(".")
    proposer = getattr(import_module(f"{__name__}.{module}"), name)
    built: HostProposer | DeviceProposer = proposer(**method.arguments(setting))
    return built
