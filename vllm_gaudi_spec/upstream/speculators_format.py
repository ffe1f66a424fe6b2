"""Support for checkpoints in the speculators format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.upstream.patching import wrap


def mend_speculators_format() -> None:
    """Use the same attention masks in block drafters as the speculators library, and reject unsupported methods.

    Reason: in the library, `sliding_window_non_causal` applies only to sliding-window layers and is False by default.
    Upstream applies the value to all layers of DFlash and ignores it for DSpark. This causes no error, but drafts are
    less accurate. For methods that upstream cannot read, such as mtp and xpress, its error lists Python functions.
    Remove when: vllm-project/vllm#56692 is released, DSpark reads the flag, and the error lists the methods.
    """
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    wrap(SpeculatorsConfig, "extract_transformers_pre_trained_config", _read_layers)
    wrap(SpeculatorsConfig, "extract_vllm_speculative_config", _read_method)


def _read_layers(original: Callable[..., Any], config_dict: dict[str, Any]) -> Any:
    _refuse_without_reader(config_dict)
    layers = original(config_dict)
    sees_later = config_dict.get("sliding_window_non_causal")  # checkpoints from older releases do not have this field
    if sees_later is False and "dflash_config" in layers:
        layers["dflash_config"].pop("causal", None)
    elif sees_later and config_dict["speculators_model_type"] == "dspark":
        layers["is_causal"] = False
    return layers


def _read_method(original: Callable[..., Any], config_dict: dict[str, Any]) -> Any:
    _refuse_without_reader(config_dict)
    return original(config_dict)


def _refuse_without_reader(config_dict: dict[str, Any]) -> None:
    from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES

    method = config_dict.get("speculators_model_type")
    if method in SUPPORTED_SPECULATORS_TYPES:
        return
    remedy = "use a drafter of method eagle3, peagle, dflash, dflash2 or dspark"
    if method == "mtp":
        remedy = "put its layers into the target's checkpoint with `speculators stitch-mtp`, and use method mtp"
    raise UnsupportedConfigError(
        f"The speculators checkpoint is for method {method}, which vLLM does not support in this format; {remedy}."
    )
