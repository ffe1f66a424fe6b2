"""All in-memory patches to vllm-ascend and its vLLM, each with the reason for it and the condition for removing it.

The tests in tests/integrations/ fail if upstream code that a patch depends on changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, IS_UNIVERSAL, UNIVERSAL_DRAFT, UnsupportedConfigError
from vllm_gaudi_spec.upstream.patching import raise_unchanged, widen, wrap

_DRAFT_MODEL = "draft_model"
# The only values of these speculative options that do not bypass the vocabulary map.
_ONLY = {"draft_sample_method": "greedy", "use_local_argmax_reduction": False, "parallel_drafting": False}


def apply() -> None:
    """Apply all patches for the supported releases. This function may be called repeatedly."""
    admit_universal_draft()
    make_universal_proposers()


def admit_universal_draft() -> None:
    """Accept the method `universal_draft` in speculative configurations, as a `draft_model` with another vocabulary.

    Reason: vLLM has a fixed list of methods, gives the drafter the target's tokenizer, and rejects vocabularies of
    different sizes. All other decisions that depend on the method must be the same as for a draft model.
    Remove when: the vLLM release used by vllm-ascend has `use_heterogeneous_vocab`, and vllm-ascend supports it.
    """
    from vllm.config import SpeculativeConfig

    widen(SpeculativeConfig, {"method": (UNIVERSAL_DRAFT,)})
    raise_unchanged(UnsupportedConfigError, SpeculativeConfig)
    wrap(SpeculativeConfig, "__post_init__", _note_universal_draft)
    wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", _skip_vocab_size_check)


def _note_universal_draft(original: Callable[..., None], config: Any) -> None:
    if config.method != UNIVERSAL_DRAFT:
        original(config)
        return
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise UnsupportedConfigError(
            f"Method {UNIVERSAL_DRAFT} on vllm-ascend needs its first model runner: unset VLLM_USE_V2_MODEL_RUNNER."
        )
    for name, only in _ONLY.items():
        if getattr(config, name) != only:
            raise UnsupportedConfigError(
                f"Method {UNIVERSAL_DRAFT} on vllm-ascend drafts one token at a time, the best one that both "
                f"vocabularies have: leave {name} out of --speculative-config."
            )
    config.method = _DRAFT_MODEL
    original(config)
    if config.method != _DRAFT_MODEL:
        raise UnsupportedConfigError(
            f"vLLM recognizes {config.model} as a drafter of method {config.method}, which is not a standalone model; "
            f"method {UNIVERSAL_DRAFT} needs one."
        )
    setattr(config, IS_UNIVERSAL, True)
    draft = config.draft_model_config
    draft.tokenizer, draft.tokenizer_revision = draft.model, draft.revision


def _skip_vocab_size_check(original: Callable[..., None], config: Any) -> None:
    if not is_universal(config):
        original(config)


def is_universal(config: Any) -> bool:
    return getattr(config, IS_UNIVERSAL, False)


def make_universal_proposers() -> None:
    """Make vllm-ascend's `get_spec_decode_method` return our proposer for this method.

    Reason: the function selects one of vllm-ascend's own classes by the name of the method. It is patched when a worker
    starts, because its module must be imported after others, which vllm-ascend's worker imports in the right order.
    Remove when: vllm-ascend lets plugins add methods.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    wrap(WorkerBase, "__init__", _wrap_when_a_worker_starts)


def _wrap_when_a_worker_starts(original: Callable[..., None], worker: Any, *args: Any, **named: Any) -> None:
    original(worker, *args, **named)
    if is_universal(worker.vllm_config.speculative_config):
        from vllm_ascend import spec_decode
        from vllm_ascend.worker import model_runner_v1

        for module in (spec_decode, model_runner_v1):  # the runner module imports the function by name
            wrap(module, "get_spec_decode_method", _get_spec_decode_method)


def _get_spec_decode_method(
    original: Callable[..., Any], method: str, vllm_config: Any, device: Any, runner: Any
) -> Any:
    if not is_universal(vllm_config.speculative_config):
        return original(method, vllm_config, device, runner)
    from vllm_gaudi_spec.integrations.vllm_ascend.proposer import AscendUniversalDraftProposer

    if ADDITIONAL_CONFIG_KEY in (vllm_config.additional_config or {}):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY} has no effect on vllm-ascend; leave it out."
        )
    return AscendUniversalDraftProposer(vllm_config, device, runner)


def refuse_universal_draft(reason: str) -> None:
    """Reject the method and explain why it is not supported.

    Reason: vLLM's own error would only list its own methods.
    Remove when: there are no unsupported releases.
    """
    from vllm.config import SpeculativeConfig

    def init(original: Callable[..., None], config: Any, *args: Any, **named: Any) -> None:
        if named.get("method") == UNIVERSAL_DRAFT:
            raise UnsupportedConfigError(reason)
        original(config, *args, **named)

    wrap(SpeculativeConfig, "__init__", init)
