"""`gaudi-spec selftest`: its options, and the environment that the checks need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.output import become, fail, python

DESCRIPTION = """\
Run the self-test of this machine's card (of its CPU where there is none), or of the device that VGS_DEVICE names:
sampling noise, attention over batches with padding, KV writes, copies to and from the card, captured graphs, memory. An
engine on a card runs the same checks when it starts, and with several ranks those of collectives. No model is loaded.
The command opens the card: end a server that uses it first.

Examples:
  gaudi-spec selftest
  VGS_DEVICE=hpu-emulated gaudi-spec selftest --dtype float32

Exit status: 0 when no check fails, 1 when one does or the device does not start, 2 for wrong options.
"""
_DTYPES = ("bfloat16", "float16", "float32")


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "selftest",
        help="check that the card computes, copies and captures graphs correctly",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("--dtype", default=_DTYPES[0], choices=_DTYPES, help="dtype in which attention is checked")
    output.add_json(add, "the result of each check")
    add("--verbose", action="store_true", help="show what vLLM logs, and the traceback of an error")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if mistake := output.mistake("--json", options.json) or versions.vllm_mistake():
        return fail("selftest", mistake)
    values = {
        # vLLM logs to stdout, which is for the table.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "INFO" if options.verbose else "WARNING",
    }
    return become(python("vllm_gaudi_spec.tools.cli.check_device", values, [*arguments]))
