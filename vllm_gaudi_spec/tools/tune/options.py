"""Options that the scripts of calibration/ have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY

_OURS = "additional_config"


def engine_options(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A script's options of the engine with the user's, which win; `additional_config.gaudi_spec` of both is merged."""
    merged = {**defaults, **overrides}
    if _OURS in defaults and _OURS in overrides:
        spec = {**defaults[_OURS].get(ADDITIONAL_CONFIG_KEY, {}), **overrides[_OURS].get(ADDITIONAL_CONFIG_KEY, {})}
        merged[_OURS] = {**defaults[_OURS], **overrides[_OURS], ADDITIONAL_CONFIG_KEY: spec}
    return merged
