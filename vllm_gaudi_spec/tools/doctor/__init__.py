"""`gaudi-spec doctor`: checks this machine and a model, and suggests a remedy for each problem.

Checks that may crash, such as importing torch or vLLM, run in a child process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import add_shared, json_object, positive
from vllm_gaudi_spec.tools.io.output import FINE, PROBLEMS, fail, find_model_mistake

DESCRIPTION = """\
Check this machine: versions, drivers, devices, plugins and environment variables. torch and vLLM are loaded in another
process. With --model, also check whether the model, or the pair of target and drafter, can be served: rejected
options, vocabulary overlap, lengths, and memory for weights, KV and the drafter's KV region. Weights are not loaded.

Examples:
  gaudi-spec doctor
  gaudi-spec doctor --model TARGET --draft DRAFTER --method universal_draft --num-speculative-tokens 4
  gaudi-spec doctor --bundle report.zip --log server.log

Exit status: 0 without problems (there may be warnings), 1 with problems, 2 for invalid options.
"""
_DEFAULT_DRAFTS = 3
_STYLES = {"problem": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="find problems with this machine or a pair of models, and their remedies",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="MODEL",
        help="folder or Hugging Face id of the target; an id downloads configuration and tokenizer (default: no model)",
    )
    add_shared(add, "--draft", metavar="MODEL", help="folder or Hugging Face id of the drafter (default: no drafter)")
    add(
        "--method",
        choices=[*METHODS, UNIVERSAL_DRAFT],
        metavar="METHOD",
        help=f"speculation method: {', '.join([*METHODS, UNIVERSAL_DRAFT])} "
        "(default: draft_model with --draft, else none)",
    )
    add_shared(
        add,
        "--num-speculative-tokens",
        type=positive,
        metavar="K",
        help=f"drafts per step (default: {_DEFAULT_DRAFTS})",
    )
    add_shared(
        add,
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="as for vllm serve; replaces --draft, --method and --num-speculative-tokens",
    )
    add("--additional-config", type=json_object, metavar="JSON", help="as for vllm serve")
    add("--max-model-len", type=positive, metavar="N", help="as for vllm serve, in tokens (default: the model's own)")
    add("--max-num-seqs", type=positive, metavar="N", help="as for vllm serve (default: vLLM's)")
    add("--tensor-parallel-size", type=positive, metavar="N", help="as for vllm serve (default: 1)")
    add("--dtype", help="as for vllm serve (default: vLLM's)")
    add("--kv-cache-dtype", metavar="DTYPE", help="as for vllm serve (default: vLLM's)")
    add(
        "--error", metavar="TEXT", help="explain the CANN error codes in this error message or log file (default: none)"
    )
    add(
        "--bundle",
        metavar="FILE",
        help="also run the self-test, and write one zip file to send with a report: findings, versions, configuration, "
        "variables, self-test, log; secrets are masked (default: none)",
    )
    add("--log", metavar="FILE", help="a server's log for --bundle (default: none)")
    output.add_json(add, "everything that was found")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if mistake := find_contradiction(options) or output.find_mistake("--json", options.json):
        return fail("doctor", mistake)
    if mistake := output.find_mistake("--bundle", options.bundle):
        return fail("doctor", mistake)
    missing = find_model_mistake(options.model, options.draft, (options.speculative_config or {}).get("model"))
    engine_options = make_engine_options(options)
    found = examine(engine_options, missing, read_error(options.error))
    if options.json != output.STDOUT:
        show(found)
    output.write_json(found, options.json)
    if options.bundle is not None:
        from vllm_gaudi_spec.tools.doctor.bundle import write_bundle

        output.write("--bundle", options.bundle, write_bundle(found, engine_options, options.log))
    return PROBLEMS if found["problems"] else FINE


def examine(options: dict[str, Any] | None, missing_model: str | None, error: str | None) -> dict[str, Any]:
    """Run all checks in the order of their dependencies.

    Args:
        options: The engine's options if a model is checked.
        missing_model: A message about a missing model folder, in which case the model is not looked up again.
        error: A message that contains error codes to explain.
    """
    from vllm_gaudi_spec.tools.doctor import machine, probe, settings
    from vllm_gaudi_spec.tools.doctor.findings import PROBLEM, conclude, note, refusal

    found = [*settings.check_versions(), *machine.check_drivers(), *machine.check_devices(), *machine.check_host()]
    found += [*settings.check_plugins(), *settings.check_settings(), *settings.check_npu_settings()]
    if error is not None:
        found += settings.explain_error(error)
    if missing_model is not None:
        found.append(refusal("models", missing_model))
    if versions.explain_unusable_vllm() is not None and not settings.serves_vllm_ascend():
        found.append(note("platform", "vLLM was not loaded, because of the problem above"))
    else:
        found += probe.probe(options if missing_model is None else None)
    return {
        "conclusion": conclude(found),
        "problems": sum(one.severity == PROBLEM for one in found),
        "findings": [asdict(one) for one in found],
        "environment": settings.list_variables(),
    }


def read_error(error: str | None) -> str | None:
    """Return the contents of the file that `error` names, or `error` itself if there is no such file."""
    if error is None or len(error) > 200 or not Path(error).is_file():
        return error
    return Path(error).read_text(errors="replace")


def find_contradiction(options: argparse.Namespace) -> str | None:
    drafting = [options.draft, options.method, options.num_speculative_tokens]
    others = [options.additional_config, options.max_model_len, options.max_num_seqs, options.dtype]
    others += [options.speculative_config, options.tensor_parallel_size, options.kv_cache_dtype]
    if options.log is not None and options.bundle is None:
        return "--log is part of the bundle; add --bundle FILE"
    if options.log is not None and not (Path(options.log).is_file() and os.access(options.log, os.R_OK)):
        return f"--log {options.log} is not a file that can be read"
    if options.bundle == output.STDOUT:
        return "--bundle writes a zip file and needs its name"
    if options.model is None and any(option is not None for option in (*drafting, *others)):
        return "these options need a model; add --model"
    if options.speculative_config is not None and any(option is not None for option in drafting):
        return "--speculative-config replaces --draft, --method and --num-speculative-tokens; leave those out"
    row = METHODS.get(options.method)
    if row is not None and options.draft is not None and not (row.has_model or "model" in row.options):
        return f"method {options.method} needs no model; leave out --draft"
    if options.num_speculative_tokens is not None and options.method is None and options.draft is None:
        return "--num-speculative-tokens needs --draft or --method"
    return None


def make_engine_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the options for vLLM's engine."""
    if options.model is None:
        return None
    spec_config = options.speculative_config
    if options.draft is not None or options.method is not None:
        drafts = options.num_speculative_tokens or _DEFAULT_DRAFTS
        spec_config = {"method": options.method or "draft_model", "num_speculative_tokens": drafts}
        spec_config |= {"model": options.draft} if options.draft is not None else {}
    return {"speculative_config": spec_config, **{name: getattr(options, name) for name in _AS_SERVED}}


_AS_SERVED = (
    *("model", "max_model_len", "max_num_seqs", "dtype", "kv_cache_dtype", "additional_config"),
    "tensor_parallel_size",
)


# ---- output ----------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    rows = [(one["severity"], one["about"], one["text"], one["remedy"]) for one in found["findings"]]
    output.show_findings(("", "about", "finding"), rows, _STYLES)
    if found["environment"]:
        print("\nenvironment variables that matter here:")
    for variable in found["environment"]:
        print(f"  {variable['name']}={variable['value']}\n      {variable['meaning']}")
    print(f"\nconclusion: {found['conclusion']}", flush=True)
