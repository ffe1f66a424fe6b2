"""The `card-emulator` command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from card_emulator import __version__, door
from card_emulator.names import ASCEND910B, CARDS, GAUDI2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="card-emulator", description="Run programs on an emulated accelerator card.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a program and its child processes on an emulated card")
    run.add_argument("--card", choices=CARDS, default=GAUDI2, help=f"default: {GAUDI2}")
    mode = run.add_mutually_exclusive_group()
    mode.add_argument(
        "--lazy",
        dest="lazy",
        action="store_true",
        default=None,
        help="run a Gaudi in lazy mode (the default unless PT_HPU_LAZY_MODE=0)",
    )
    mode.add_argument("--compiled", dest="lazy", action="store_false", help="run a Gaudi in eager and compiled mode")
    run.add_argument(
        "--kind",
        action="store_true",
        help="let a Gaudi accept operations that are known to fail only on some cards or releases",
    )
    run.add_argument(
        "--torch-npu",
        type=Path,
        metavar="FOLDER",
        help="the folder that contains Huawei's torch_npu, for an Ascend NPU",
    )
    run.add_argument("program", nargs="+", metavar="-- PROGRAM", help="the program and its arguments")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    is_npu = options.card == ASCEND910B
    if is_npu and (options.lazy is not None or options.kind):
        parser.error("--lazy, --compiled and --kind apply only to a Gaudi")
    if options.torch_npu is not None and not is_npu:
        parser.error(f"--torch-npu applies only to --card {ASCEND910B}")
    chosen = door.variables(
        door.cached_door(options.card),
        options.card,
        lazy=options.lazy,
        kind=options.kind,
        torch_npu=options.torch_npu,
    )
    try:
        os.execvpe(options.program[0], options.program, os.environ | chosen)
    except OSError as error:
        parser.error(f"{options.program[0]}: {error.strerror}")
