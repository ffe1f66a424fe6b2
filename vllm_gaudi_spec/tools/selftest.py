"""`gaudi-spec selftest`: its options, and the self-test of the device.

When run as a program, this module opens the device, after `start` has set the environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import Parser

if TYPE_CHECKING:
    from vllm_gaudi_spec.self_test.result import Result

DESCRIPTION = """\
Test the device that VGS_DEVICE names, otherwise this machine's card, or its CPU if it has no card: sampling noise,
attention over batches with padding, KV writes, copies to and from the card, captured graphs, memory. No model is
loaded. On a card, an engine runs the same checks when it starts, plus checks of collectives if it has several ranks.
The command opens the card, so stop a server that uses it first.

Examples:
  gaudi-spec selftest
  VGS_DEVICE=hpu-emulated gaudi-spec selftest --dtype float32

Exit status: 0 if no check fails, 1 if one does or the device does not start, 2 for invalid options.
"""
_DTYPES = ("bfloat16", "float16", "float32")
_STYLES = {"passed": "green", "failed": "bold red", "not checked": "cyan"}


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "selftest",
        help="check that the card computes, copies and captures graphs correctly",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("--dtype", default=_DTYPES[0], choices=_DTYPES, help="dtype in which attention is checked")
    output.add_json(add, "the result of each check")
    add("--verbose", action="store_true", help="show vLLM's log, and the traceback of an error")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if mistake := output.find_mistake("--json", options.json) or versions.explain_unusable_vllm():
        return output.fail("selftest", mistake)
    variables = {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # vLLM logs to stdout by default, which is reserved for the table
        "VLLM_LOGGING_LEVEL": "INFO" if options.verbose else "WARNING",
    }
    return output.run_module(__name__, variables, arguments)


# ---- in the process that opens the device ------------------------------------------------------------------


def run_checks(options: argparse.Namespace) -> int:
    try:
        result = check_device(options.dtype)
    except ModuleNotFoundError:  # `output.guard` prints the remedy
        raise
    except Exception as error:
        if options.verbose:
            raise
        return output.fail("selftest", f"{in_one_line(error)} (--verbose shows where)", output.PROBLEMS)
    if options.json != output.STDOUT:
        show(result)
    output.write_json(result.as_json(), options.json)
    return output.PROBLEMS if result.failed else output.FINE


def check_device(dtype: str) -> Result:
    import torch
    from vllm.platforms import current_platform

    from vllm_gaudi_spec.device_table import load_backend, refuse_unknown_device
    from vllm_gaudi_spec.platforms.base import is_active
    from vllm_gaudi_spec.self_test.run import self_test

    refuse_unknown_device()
    if not is_active():
        raise ValueError("vLLM runs on another platform plugin; set VLLM_PLUGINS to gaudi_spec, or set VGS_DEVICE")
    backend = load_backend()
    # Workers also do this before they load a model.
    current_platform.set_device(torch.device(backend.traits.torch_device.type, 0))
    current_platform.import_kernels()
    return self_test(backend, getattr(torch, dtype))


def show(result: Result) -> None:
    output.show_findings(
        ("", "check", "measured"),
        [(check.status, check.name, check.detail, check.advice) for check in result.checks],
        _STYLES,
    )
    outcome = f"{len(result.failed)} failed" if result.failed else result.summarize()
    print(f"\n{result.device}, mode {result.mode}, {result.dtype}: {outcome}", flush=True)


if __name__ == "__main__":
    parser = Parser()
    add_to(parser.add_subparsers())
    parsed = parser.parse_args()
    sys.exit(output.guard("selftest", lambda: run_checks(parsed), verbose=parsed.verbose))
