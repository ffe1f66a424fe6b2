"""Types of arguments that command lines have in common: a mistake is one line that names what was expected."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any


def at_least(smallest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of {smallest} or more")
        return int(text)

    return read


positive = at_least(1)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text} is not a JSON object; write it like \'{{"name": "value"}}\'')
    return value


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return value
