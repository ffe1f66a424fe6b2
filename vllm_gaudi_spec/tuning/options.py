"""Options that the scripts of calibration/ have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY

_OURS = "additional_config"


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number of 1 or more was expected, not {text}")
    return number


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: more options for an engine, as {"dtype": "float32"}."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a JSON object was expected: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'a JSON object such as {{"dtype": "float32"}} was expected, not {text}')
    return value


def engine_options(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a script asks of the engine, and what the user does, who wins; `additional_config.gaudi_spec` of both is put
    together."""
    merged = {**own, **given}
    if _OURS in own and _OURS in given:
        spec = {**own[_OURS].get(ADDITIONAL_CONFIG_KEY, {}), **given[_OURS].get(ADDITIONAL_CONFIG_KEY, {})}
        merged[_OURS] = {**own[_OURS], **given[_OURS], ADDITIONAL_CONFIG_KEY: spec}
    return merged
