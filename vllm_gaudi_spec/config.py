"""All configuration, read once: the environment, and `additional_config["gaudi_spec"]` of vLLM.

Nobody else in the package reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADDITIONAL_CONFIG_KEY = "gaudi_spec"


class UnsupportedConfigError(RuntimeError):
    """The user asked for something that this platform cannot do; the message names the option to change.

    Not a ValueError on purpose: pydantic swallows those into a report whose last line says nothing.
    """


def requested_device() -> str | None:
    """The device named by VGS_DEVICE, or None when the choice is ours."""
    return os.environ.get("VGS_DEVICE") or None


def skip_warmup() -> bool:
    return os.environ.get("VGS_SKIP_WARMUP", "0") not in ("", "0")


def preloaded_libraries() -> str:
    return os.environ.get("LD_PRELOAD", "")


def vllm_plugins_allowed() -> set[str] | None:
    """The plugins that VLLM_PLUGINS lets in; None means all."""
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else {name.strip() for name in names.split(",")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user can set under `additional_config["gaudi_spec"]`.

    None means that the device's own default is taken.
    """

    batch_buckets: tuple[int, ...] | None = None
    """Decode batch sizes; each decode step is padded up to one of these."""
    prefill_buckets: tuple[int, ...] | None = None
    """Prompt chunk lengths; each chunk is padded up to one of these."""
    prefill_rows: tuple[int, ...] | None = None
    """How many prompt chunks of one length may share a step."""
    warmup_tokens: int | None = None
    """Shapes of up to this many tokens are run during warm-up, larger ones only listed. -1 runs them all."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Options:
        given: dict[str, Any] = dict((vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY, {}))
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise UnsupportedConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY} has unknown option(s) {', '.join(unknown)}; "
                f"known are {', '.join(known)}."
            )
        for name, value in given.items():
            given[name] = value if name == "warmup_tokens" else _bucket_list(name, value)
        return cls(**given)


def _bucket_list(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, int) and v > 0 for v in value):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be a list of positive integers, got {value!r}."
        )
    return tuple(sorted(set(value)))


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise at start-up, with the option to change, for every combination that would not work later."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model is None:
        return
    reasons = [
        (
            model.runner_type != "generate",
            f"{model.model} is a {model.runner_type} model; only text generation is supported",
        ),
        (
            model.is_multimodal_model,
            f"{model.model} is multimodal; use a text-only model or --language-model-only",
        ),
        (
            model.is_hybrid or model.has_inner_state,
            f"{model.model} keeps recurrent state; use an attention-only model",
        ),
        (model.is_encoder_decoder, f"{model.model} is an encoder-decoder model; use a decoder-only model"),
        (
            model.use_mla,
            f"{model.model} uses MLA attention, which is not supported yet; use a model without it",
        ),
        (vllm_config.lora_config is not None, "LoRA is not supported yet; leave out --enable-lora"),
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism is not supported; use --pipeline-parallel-size 1",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "context parallelism is not supported; leave the option out",
        ),
        (parallel.enable_dbo, "dual-batch overlap is not supported; leave out --enable-dbo"),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding is not supported yet; leave out --speculative-config",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "KV transfer is not supported; leave out --kv-transfer-config",
        ),
        (model.enable_prompt_embeds, "prompt embeddings are not supported; leave out --enable-prompt-embeds"),
        (
            vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"),
            f"--kv-cache-dtype {vllm_config.cache_config.cache_dtype} is not supported; use auto",
        ),
    ]
    for unsupported, message in reasons:
        if unsupported:
            raise UnsupportedConfigError(message + ".")
