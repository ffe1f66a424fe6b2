"""`gaudi-spec`: the command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_gaudi_spec import __version__
from vllm_gaudi_spec.tools.cli import chat, completion, demo, doctor, graph_check, output, report, selftest, top, tune
from vllm_gaudi_spec.tools.io.command_line import Parser

_COMMANDS = {
    "doctor": doctor,
    "selftest": selftest,
    "demo": demo,
    "report": report,
    "graph-check": graph_check,
    "tune": tune,
    "top": top,
    "chat": chat,
    "completion": completion,
}
_STATUSES = (
    "Exit status of all commands: 0 when all is well, 1 when something was found or failed, 2 for wrong options."
)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gaudi-spec", description="vLLM on Intel Gaudi, built around speculative decoding.", epilog=_STATUSES
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS.values():
        command.add_to(commands)
    parser.set_defaults(parser=parser)  # completion reads all commands' options off it
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = make_parser().parse_args(arguments)
    verbose = getattr(options, "verbose", False)  # not every command has it
    return output.guarded(
        options.command, lambda: _COMMANDS[options.command].start(options, arguments), verbose=verbose
    )
