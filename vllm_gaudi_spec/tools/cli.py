"""`gaudi-spec`: the command line. Expensive modules are imported only when a command needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from vllm_gaudi_spec import __version__
from vllm_gaudi_spec.tools import chat, demo, doctor, estimate, graph_check, report, selftest, top
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import Parser

_EPILOG = (
    "To get started, run gaudi-spec doctor to check this machine, or gaudi-spec demo to see what drafts do.\n"
    "COMMAND --help lists the options of a command.\n"
    "Exit status of all commands: 0 success, 1 a problem was found or the work failed, 2 invalid options,"
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(output.USAGE)
    options = parser.parse_args(arguments)
    verbose = getattr(options, "verbose", False)  # some commands do not have this option
    return output.guard(options.command, lambda: COMMANDS[options.command].start(options, arguments), verbose=verbose)


COMMANDS: dict[str, Any] = {
    "doctor": doctor,
    "selftest": selftest,
    "demo": demo,
    "report": report,
    "graph-check": graph_check,
    "estimate": estimate,
    "top": top,
    "chat": chat,
}
"""Each command has `add_to(subparsers)` and `start(options, arguments)`, which returns the exit status."""

if __name__ == "__main__":
    sys.exit(main())
