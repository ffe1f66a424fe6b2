"""Drafters: one a file, found by vLLM's name of the method."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.proposers.base import DeviceProposer, HostProposer, Model


class _Method(NamedTuple):
    where: str
    """Module and class; imported only when it is picked."""
    arguments: Callable[[VllmConfig, SpeculativeConfig], dict[str, Any]]
    on_device: bool = False
    has_model: bool = False
    """Loaded by the runner and handed over as `model`."""


def _ngram(config: VllmConfig, given: SpeculativeConfig) -> dict[str, Any]:
    return {"min_ngram": given.prompt_lookup_min, "max_ngram": given.prompt_lookup_max}


def _suffix(config: VllmConfig, given: SpeculativeConfig) -> dict[str, Any]:
    names = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    return {name: getattr(given, f"suffix_decoding_{name}") for name in names}


def _custom(config: VllmConfig, given: SpeculativeConfig) -> dict[str, Any]:
    return {"vllm_config": config, "vocab_size": config.model_config.get_vocab_size()}


def _draft_model(config: VllmConfig, given: SpeculativeConfig) -> dict[str, Any]:
    return {"vocab_size": config.model_config.get_vocab_size()}


_METHODS = {
    "ngram": _Method("ngram.NgramProposer", _ngram),
    "ngram_gpu": _Method("ngram.DeviceNgramProposer", _ngram, on_device=True),
    "suffix": _Method("suffix.SuffixProposer", _suffix),
    "draft_model": _Method("autoregressive.AutoregressiveProposer", _draft_model, on_device=True, has_model=True),
    "custom_class": _Method("custom.CustomProposer", _custom),
}


def is_on_device(speculation: Speculation) -> bool:
    """Whether the method drafts on the device, without the host."""
    return _METHODS[speculation.method].on_device


def has_model(speculation: Speculation) -> bool:
    """Whether the method's drafter is a model."""
    return _METHODS[speculation.method].has_model


def build_proposer(
    speculation: Speculation, vllm_config: VllmConfig, model: Model | None
) -> HostProposer | DeviceProposer:
    method = _METHODS[speculation.method]
    module, name = method.where.split(".")
    proposer = getattr(import_module(f"{__name__}.{module}"), name)
    assert vllm_config.speculative_config is not None
    arguments = method.arguments(vllm_config, vllm_config.speculative_config)
    if method.has_model:
        arguments["model"] = model
    built: HostProposer | DeviceProposer = proposer(**arguments)
    return built
