"""Option handling shared by all commands: types, spelling with dashes or underscores, and defaults in --help."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

SHARED = {
    "--card": (),
    "--draft": ("--draft-model",),
    "--num-speculative-tokens": ("--num-spec-tokens",),
    "--output-len": ("--osl",),
    "--speculative-config": (),
}
"""Options that several commands share, mapped to their names in vllm-gaudi's script."""


def add_shared(add: Callable[..., Any], name: str, **options: Any) -> None:
    add(name, *SHARED[name], **options)


class Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that adds the default to the help of options that take a value and do not mention it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        is_positional = not action.option_strings and action.nargs is None
        if "default" in text or action.nargs == 0 or action.required or is_positional or default is argparse.SUPPRESS:
            return action.help
        words = ["none"] if default in (None, [], {}) else default if isinstance(default, list) else [default]
        return f"{text} (default: {' '.join(map(str, words))})".replace("%", "%%")


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # argparse declares overloads for it
        return super().parse_known_args(None if args is None else list(map(use_dashes, args)), namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which is so long that it would hide the message."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def use_dashes(argument: str) -> str:
    """Convert --like_this=A_B to --like-this=A_B."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


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


def _up_to(largest: float, meaning: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= largest or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number {meaning}")
        return value

    return read


not_negative = _up_to(math.inf, "of 0 or more")
share = _up_to(1, "from 0 to 1")
