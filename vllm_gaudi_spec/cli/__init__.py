"""`gaudi-spec`: the command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_gaudi_spec.cli import graph_check


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gaudi-spec", description="Checks of vLLM on Intel Gaudi, real or emulated.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    graph_check.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when all is well, 1 when something was found, 2 for wrong options."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return graph_check.start(make_parser().parse_args(arguments), arguments)
