"""Options that the scripts of calibration/ have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY

_OURS = "additional_config"


def engine_options(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a script asks of the engine, and what the user does, who wins; `additional_config.gaudi_spec` of both is put
    together."""
    merged = {**own, **given}
    if _OURS in own and _OURS in given:
        spec = {**own[_OURS].get(ADDITIONAL_CONFIG_KEY, {}), **given[_OURS].get(ADDITIONAL_CONFIG_KEY, {})}
        merged[_OURS] = {**own[_OURS], **given[_OURS], ADDITIONAL_CONFIG_KEY: spec}
    return merged
