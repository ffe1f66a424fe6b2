"""`gaudi-spec completion`: what a shell needs to complete our commands and options, made by shtab from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

DESCRIPTION = """\
Print a script that completes commands, options and their values. Load it in your shell's start-up file:

  bash   eval "$(gaudi-spec completion bash)"
  zsh    eval "$(gaudi-spec completion zsh)"
  fish   gaudi-spec completion fish | source

Exit status: 0 when it was printed, 2 for another shell.
"""
# What stands before shtab's. zsh: where nothing loaded its own completion yet; -i passes over folders of others, and
# asks nothing.
_SHELLS = {
    "bash": "",
    "fish": "",
    "zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n",
}
# Metavars of options and arguments that name a file or a folder.
_PATHS = ("FILE", "FOLDER", "MODEL", "METHOD[=MODEL]", "RUN.json", "SOURCE")


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description=DESCRIPTION,
    )
    parser.add_argument("shell", choices=sorted(_SHELLS), help="your shell")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    print(script(options.parser, options.shell), end="")
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    import shtab

    for action in _actions(parser):
        if action.metavar in _PATHS:
            vars(action)["complete"] = shtab.FILE
    return f"{_SHELLS[shell]}{shtab.complete(parser, shell=shell)}\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
