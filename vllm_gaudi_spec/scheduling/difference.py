"""The file of an audit's first difference: token ids and options, no text."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, Speculation
from vllm_gaudi_spec.devices import describe_device
from vllm_gaudi_spec.environment import cache_folder, cached_files
from vllm_gaudi_spec.versions import installed, installed_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.scheduling.comparison import Difference

logger = init_logger(__name__)

_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    "bad_words_token_ids",
)
"""Those that choose tokens; none is text."""


def write_difference(
    difference: Difference, vllm_config: VllmConfig, speculation: Speculation, tolerance: float
) -> Path | None:
    """The file, which only this user can read; None where it could not be written."""
    text = json.dumps(_content(difference, vllm_config, speculation, tolerance), indent=1)
    try:
        folder = cached_files.own_folder(cache_folder()) / "audits"
        path = folder / f"difference-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        cached_files.write(path, text.encode())  # for this user alone
    except (OSError, RuntimeError) as error:  # the latter where the user has no home
        logger.warning("The difference that an audit found cannot be written: %s", error)
        return None
    return path


def _content(
    difference: Difference, vllm_config: VllmConfig, speculation: Speculation, tolerance: float
) -> dict[str, object]:
    finished, position = difference.finished, difference.position
    outputs = {"with_drafts": finished.outputs, "without_drafts": difference.without_drafts}
    model = vllm_config.model_config
    return {
        "prompt_token_ids": finished.prompt,
        **outputs,
        "position": position,
        "candidates": {name: tokens[position : position + 1] for name, tokens in outputs.items()},
        "scores": {str(token): score for token, score in difference.scores.items()},
        "scores_are": model.logprobs_mode,
        "tolerance": tolerance,
        "sampling_params": {name: getattr(finished.params, name) for name in _PARAMS},
        "model": model.model,
        "dtype": str(model.dtype),
        "speculation": asdict(speculation),
        "options": (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY),
        "async_scheduling": vllm_config.scheduler_config.async_scheduling,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        **describe_device(),
        "versions": {"vllm": installed_vllm(), **{name: installed(name) for name in ("vllm-gaudi-spec", "torch")}},
    }
