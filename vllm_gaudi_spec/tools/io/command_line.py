"""The options of all commands: types, dashes or underscores as in vLLM, defaults in --help, suggestions for typos."""

from __future__ import annotations

import argparse
import difflib
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

# What several commands take: its name, as vLLM has it where vLLM has one, and those of vllm-gaudi's script, which are
# understood too.
SHARED = {
    "--card": (),
    "--draft": ("--draft-model",),
    "--num-speculative-tokens": ("--num-spec-tokens",),
    "--output-len": ("--osl",),
    "--speculative-config": (),
}


def add_shared(add: Callable[..., Any], name: str, **options: Any) -> None:
    add(name, *SHARED[name], **options)


class Help(argparse.RawDescriptionHelpFormatter):
    """Add the default to the help of each option that takes a value and does not name it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if "default" in text or action.nargs == 0 or action.required or action.default is argparse.SUPPRESS:
            return action.help
        if not action.option_strings and action.nargs is None:  # it has to be given
            return action.help
        return f"{text} (default: {_shown(action.default)})".lstrip()


def _shown(default: Any) -> str:
    """Return the default as argparse expects it, with percent signs doubled."""
    if default in (None, [], {}):
        return "none"
    words = default if isinstance(default, list) else [default]
    return " ".join(map(str, words)).replace("%", "%%")


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help} | options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # argparse's has overloads
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._chosen(found).refuse(unknown)
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # the same
        return super().parse_known_args(None if args is None else list(map(with_dashes, args)), namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, whose many lines would hide it."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if close := difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1):
                error.message += f"; did you mean {close[0]}?"
            raise

    def _chosen(self, found: argparse.Namespace) -> Parser:
        """Return the parser of the chosen command, or this one if it has no commands."""
        commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parser = commands[0].choices.get(getattr(found, commands[0].dest)) if commands else None
        return parser if isinstance(parser, Parser) else self

    def refuse(self, unknown: list[str]) -> NoReturn:
        names = [argument.partition("=")[0] for argument in unknown]
        close = (difflib.get_close_matches(name, self._option_string_actions, n=1) for name in names if name[:1] == "-")
        likely = [match for matches in close for match in matches]
        question = f"; did you mean {' and '.join(likely)}?" if likely else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{question}")


def with_dashes(argument: str) -> str:
    """--like_this=A_B as --like-this=A_B."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


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
