"""`gaudi-spec graph-check`: its options, and the environment that the check needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.device_table import DEVICES, missing_software
from vllm_gaudi_spec.environment import DEVICE, ENGINE_PROCESS, SELF_TEST, SKIP_WARMUP
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import add_shared, at_least, json_object, positive

DESCRIPTION = """\
Run a mixed workload on a model, and report whether a Gaudi or an Ascend NPU runs only graphs that warm-up captured. The
workload has prompts of many lengths, batches that grow and shrink, all kinds of sampling, late arrivals and aborts. The
default device is an emulated Gaudi, which needs no card.

Examples:
  gaudi-spec graph-check
  gaudi-spec graph-check MODEL --device ascend-emulated
  gaudi-spec graph-check --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'

Exit status: 0 when no step compiles after warm-up and none has more device-to-host syncs than allowed, 1 when one does
or the model does not run, 2 for invalid options.
"""
# Emulated cards come first, because they are available on every machine.
CHECKED = sorted((name for name, device in DEVICES.items() if device.has_graph_check), reverse=True)


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "graph-check",
        help="count graphs compiled after warm-up, and device-to-host syncs per step",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or Hugging Face id (default: the demo model)")
    add_shared(add, "--speculative-config", type=json_object, metavar="JSON", help="as for vllm serve (default: none)")
    add("--additional-config", type=json_object, metavar="JSON", help="as for vllm serve")
    add("--max-model-len", type=at_least(64), default=512, metavar="N", help="as for vllm serve, in tokens")
    add("--max-num-seqs", type=positive, default=4, metavar="N", help="as for vllm serve")
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="as for vllm serve")
    add("--device", default=CHECKED[0], choices=CHECKED, help="the card, real or emulated")
    add("--requests", type=positive, default=32, metavar="N", help="number of requests in the workload")
    add("--seed", type=at_least(0), default=0, metavar="S", help="the same seed gives the same workload")
    add(
        "--host-syncs",
        type=positive,
        default=1,
        metavar="N",
        help="device-to-host syncs allowed per step; universal_draft with retokenize and slem needs 2",
    )
    output.add_json(add, "everything that was counted")
    add("--verbose", action="store_true", help="show vLLM's log, and the traceback of an error")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check the options before anything expensive is loaded, and then start the engine."""
    if mistake := find_mistake(options):
        return output.fail("graph-check", mistake)
    return output.run_module(f"{__name__}.engine", set_environment(options), arguments)


def find_mistake(options: argparse.Namespace) -> str | None:
    drafter = (options.speculative_config or {}).get("model")
    if mistake := output.find_model_mistake(options.model, drafter) or output.find_mistake("--json", options.json):
        return mistake
    device = options.device
    if (software := missing_software(device)) is not None:
        return f"--device {device} needs the vendor's image with {software}; without a card, use {device}-emulated"
    return versions.explain_unusable_vllm()


def set_environment(options: argparse.Namespace) -> dict[str, str]:
    """Return variables for the check, which override those set in the shell."""
    variables = {
        DEVICE.name: options.device,
        SKIP_WARMUP.name: "0",
        SELF_TEST.name: "0",  # the self-test's graphs would count as warm-up graphs that are never used
        ENGINE_PROCESS.name: "0",  # the counters are those of the current process
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # vLLM logs to stdout by default, which is reserved for the table
        "VLLM_LOGGING_LEVEL": "INFO" if options.verbose else "WARNING",
    }
    if options.device.endswith("-emulated"):  # on a machine with a card, torch would open the card
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return variables
