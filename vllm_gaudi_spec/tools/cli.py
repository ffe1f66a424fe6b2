"""`gaudi-spec`: the command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from vllm_gaudi_spec import __version__
from vllm_gaudi_spec.tools import chat, demo, doctor, graph_check, report, selftest, top
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import Parser

_EPILOG = (
    "To start with: gaudi-spec doctor checks this machine, and gaudi-spec demo shows what drafts do.\n"
    "COMMAND --help lists the options of a command.\n"
    "Exit status of all commands: 0 success, 1 a problem was found or the work failed, 2 wrong options,"
    " 130 interrupted."
)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gaudi-spec",
        description="Tools for vllm-gaudi-spec: vLLM with speculative decoding on Gaudi, Ascend NPUs and CPUs.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add_to(commands)
    parser.set_defaults(parser=parser)  # completion reads all commands' options from it
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(output.USAGE)
    options = parser.parse_args(arguments)
    verbose = getattr(options, "verbose", False)  # some commands do not have it
    return output.guard(options.command, lambda: COMMANDS[options.command].start(options, arguments), verbose=verbose)


# ---- completion --------------------------------------------------------------------------------------------


_COMPLETION = """\
Print a script that completes commands, options and their values. Load it in your shell's start-up file:

  bash   eval "$(gaudi-spec completion bash)"
  zsh    eval "$(gaudi-spec completion zsh)"
  fish   gaudi-spec completion fish | source

Exit status: 0 when it was printed, 2 for another shell.
"""
# What to print before shtab's script. In zsh, load the completion system if nothing has; -i skips folders of other
# users without asking.
_SHELLS = {
    "bash": "",
    "fish": "",
    "zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n",
}
# Metavars of options and arguments that name a file or a folder.
_PATHS = ("FILE", "FOLDER", "MODEL", "RUN.json", "SOURCE")


def _add_completion_to(commands: Any) -> None:
    parser = commands.add_parser(
        "completion", help="print a completion script for bash, zsh or fish", description=_COMPLETION
    )
    parser.add_argument("shell", choices=sorted(_SHELLS), help="your shell")


def _start_completion(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    import shtab

    for action in _list_actions(options.parser):
        if action.metavar in _PATHS:
            vars(action)["complete"] = shtab.FILE
    print(f"{_SHELLS[options.shell]}{shtab.complete(options.parser, shell=options.shell)}")
    return output.FINE


def _list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _list_actions(command)


COMMANDS: dict[str, Any] = {
    "doctor": doctor,
    "selftest": selftest,
    "demo": demo,
    "report": report,
    "graph-check": graph_check,
    "top": top,
    "chat": chat,
    "completion": SimpleNamespace(add_to=_add_completion_to, start=_start_completion),
}
"""Each command has `add_to(subparsers)` and `start(options, arguments)`, which returns the exit status."""

if __name__ == "__main__":
    sys.exit(main())
