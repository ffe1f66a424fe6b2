"""Find out how far to speculate: the method, k and batch-size schedule that give most tokens a second.

python calibration/choose_speculation.py MODEL --draft draft_model=DRAFTER --draft eagle=HEAD --batches 1 4 16

For each drafter and k an engine answers the prompts, which says how far drafts are accepted, and times its steps with
drafts and without in turns, at each batch size. With --device gaudi2 or gaudi3 no step is timed: costs are estimates of
the emulator's cost model, and one engine a drafter measures acceptance. Nothing here was run on a Gaudi.

Written to --out: choice.json with the arguments for `vllm serve`, choice.svg, and each engine's answers, which are
kept: the command goes on where it was interrupted, and measures anew what changed. ngram is always a candidate.

Exit status: 0 when there is an answer (also that speculation does not pay), 1 when something failed, 2 for options that
make no sense.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.argument_types import json_object, positive
from vllm_gaudi_spec.backends import choose_device
from vllm_gaudi_spec.config import (
    ADDITIONAL_CONFIG_KEY,
    MAX_DRAFTS,
    METHODS,
    MTP,
    UNIVERSAL_DRAFT,
    WEIGHTLESS_METHODS,
    quant_config_path,
)
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.fingerprint import fingerprint
from vllm_gaudi_spec.tuning import chart, choice
from vllm_gaudi_spec.tuning.cases import Cases
from vllm_gaudi_spec.tuning.choice import Candidate
from vllm_gaudi_spec.tuning.costs import StepCost
from vllm_gaudi_spec.tuning.prompts import load_prompts
from vllm_gaudi_spec.tuning.steps import exit_status

NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
NEED_NO_MODEL = (*WEIGHTLESS_METHODS, MTP)
GENERATIONS = ("gaudi2", "gaudi3")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Drafter:
    name: str
    config: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Drafter:
        method, _, path = text.rpartition("=")
        if not method and text in NEED_NO_MODEL:
            return cls(text, NGRAM if text == "ngram" else {"method": text})
        method = method or "draft_model"
        if method not in (*METHODS, UNIVERSAL_DRAFT) or not path:
            known = ", ".join(name for name in (*METHODS, UNIVERSAL_DRAFT) if name not in NEED_NO_MODEL)
            raise argparse.ArgumentTypeError(
                f"{text!r} is no drafter: write METHOD=MODEL with one of {known}; {' or '.join(NEED_NO_MODEL)}; "
                "or a model alone for draft_model"
            )
        return cls(method, {"method": method, "model": path})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face id or folder of the target")
    add("--draft", type=Drafter.parse, action="append", default=[], metavar="METHOD[=MODEL]", help="can be repeated")
    add("--prompts", metavar="SOURCE", help="a JSONL file or a Hugging Face dataset (default: a built-in set)")
    add("--limit", type=positive, metavar="N", help="the first N of them")
    add("--num-drafts", type=positive, nargs="+", default=[1, 2, 3, 4, 5], metavar="K", help="numbers of drafts to try")
    add("--batches", type=positive, nargs="+", default=[1, 4, 16], metavar="B", help="batch sizes to be served")
    add("--max-num-seqs", type=positive, metavar="N", help="of the server (default: the largest of --batches)")
    add("--tokens", type=positive, default=64, help="of each prompt's answer, past any end token")
    add("--temperature", type=float, default=0.0)
    add("--turns", type=positive, default=3, metavar="N", help="with drafts and without, at each batch size")
    add("--device", choices=GENERATIONS, help="estimate this card's costs instead of timing steps here")
    add("--one-run", action="store_true", help="with --device: tell smaller k from the run with the largest")
    add("--context", type=positive, metavar="N", help="with --device: tokens of KV a request (default: as the prompts)")
    add("--speculative", type=json_object, default={}, metavar="JSON", help="more of speculative_config, for all")
    add(
        "--engine",
        type=json_object,
        default={},
        metavar="JSON",
        help='more options of LLM(...), as {"dtype": "float32"}',
    )
    add("--out", type=Path, default=Path(".calibration/speculation"), metavar="FOLDER")
    add("--json", action="store_true", help="print choice.json instead of tables")
    options = parser.parse_args()
    if contradiction := contradiction_in(options):
        parser.error(contradiction)
    return options


def contradiction_in(options: argparse.Namespace) -> str | None:
    if max(options.num_drafts) > MAX_DRAFTS:
        return f"--num-drafts: a step verifies at most {MAX_DRAFTS} drafts, not {max(options.num_drafts)}"
    if options.max_num_seqs and options.max_num_seqs < max(options.batches):
        return f"--max-num-seqs {options.max_num_seqs} is less than a batch of {max(options.batches)}"
    if not options.device and (options.one_run or options.context):
        return "--one-run and --context are for --device"
    if options.tokens < 2:
        return "--tokens: the first token is the prompt's, so 2 at least"
    return None


# ---- measuring -------------------------------------------------------------------------------------------


def candidates(options: argparse.Namespace, say: Say) -> list[Candidate]:
    prompts = load_prompts(options.prompts, options.limit)
    drafters = [*options.draft, *(drafter for drafter in [Drafter.parse("ngram")] if drafter not in options.draft)]
    cases = Cases(options.out, say)
    if options.device:
        for drafter in drafters:  # what can not be estimated is refused before acceptance is measured
            estimate(drafter, 1, 1, options.context or 1, options)
        return [found for drafter in drafters for found in estimated(drafter, prompts, cases, options, say)]
    plain = timed_without_drafts(prompts, cases, options, say)
    return [found for drafter in drafters for found in timed(drafter, prompts, plain, cases, options, say)]


def timed_without_drafts(
    prompts: list[str], cases: Cases, options: argparse.Namespace, say: Say
) -> dict[int, StepCost] | None:
    """Where a device works behind the host's back, a host's clock can not tell what a drafter takes of a plain step: so
    plain steps are timed in an engine without one."""
    if choose_device() == "cpu":
        return None
    say(f"no drafter: steps at batch {words(sizes(options))}")
    task = task_of(None, 0, prompts, options) | {"asked": [], "batches": sizes(options)}
    return {cost.batch: cost for cost in cases.answer("plain", task).costs}


def sizes(options: argparse.Namespace) -> list[int]:
    """Those asked for, and the largest that the server will see: the schedule goes that far."""
    return sorted({*options.batches, options.max_num_seqs or 0} - {0})


def timed(
    drafter: Drafter,
    prompts: list[str],
    plain: dict[int, StepCost] | None,
    cases: Cases,
    options: argparse.Namespace,
    say: Say,
) -> list[Candidate]:
    found = []
    for drafts in sorted(set(options.num_drafts)):
        say(f"{drafter.name}, k = {drafts}: acceptance, and steps at batch {words(sizes(options))}")
        task = task_of(drafter, drafts, prompts, options) | {"asked": [drafts], "batches": sizes(options)}
        answer = cases.answer(f"{drafter.name}-{drafts}", task)
        costs = answer.costs
        if plain is not None:
            costs = tuple(replace(cost, plain_s=plain[cost.batch].plain_s) for cost in costs)
        found.append(Candidate(drafter.name, config_of(drafter, options), answer.acceptance[drafts], costs))
    return found


def estimated(
    drafter: Drafter, prompts: list[str], cases: Cases, options: argparse.Namespace, say: Say
) -> list[Candidate]:
    drafts = sorted(set(options.num_drafts))
    say(f"{drafter.name}, k = {words(drafts)}: acceptance")
    task = task_of(drafter, drafts[-1], prompts, options)
    task |= {"asked": drafts[-1:] if options.one_run else drafts, "batches": []}
    answer = cases.answer(f"{drafter.name}-acceptance", task)
    longest = answer.acceptance[drafts[-1]]
    return [
        Candidate(
            drafter.name,
            config_of(drafter, options),
            answer.acceptance.get(num) or longest.shortened(num),
            tuple(
                estimate(drafter, num, batch, options.context or answer.context, options) for batch in sizes(options)
            ),
        )
        for num in drafts
    ]


def estimate(drafter: Drafter, drafts: int, batch: int, context: int, options: argparse.Namespace) -> StepCost:
    # Not before there is a use for it: the cost model takes torch along.
    from vllm_gaudi_spec.tuning import estimates

    model = drafter.config.get("model")
    return estimates.estimate(
        target=Path(options.model),
        method=drafter.name,
        drafter=Path(model) if model else None,
        num_drafts=drafts,
        batch=batch,
        context=context,
        generation=options.device,
    )


def task_of(drafter: Drafter | None, drafts: int, prompts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All that an answer depends on, also what an engine finds out for itself. Without a drafter, of a plain engine."""
    speculative = config_of(drafter, options) | {"num_speculative_tokens": drafts} if drafter else None
    given = (options.engine.get("additional_config") or {}).get(ADDITIONAL_CONFIG_KEY, {})
    return {
        "model": options.model,
        "speculative": speculative,
        "prompts": prompts,
        "tokens": options.tokens,
        "temperature": options.temperature,
        "turns": options.turns,
        "max_num_seqs": sizes(options)[-1],
        "engine": options.engine,
        "device": choose_device(),
        "weights": [fingerprint(model) for model in (options.model, (speculative or {}).get("model")) if model],
        "quantized": [
            Path(path).read_text() for path in (quant_config_path(), given.get("draft_quant_config")) if path
        ],
        "versions": [version(package) for package in ("vllm-gaudi-spec", "torch")],
    }


def config_of(drafter: Drafter, options: argparse.Namespace) -> dict[str, Any]:
    return drafter.config | options.speculative


def check_models(options: argparse.Namespace) -> None:
    """Before an engine is started."""
    for model in (options.model, *(drafter.config["model"] for drafter in options.draft if "model" in drafter.config)):
        if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            raise ValueError(f"there is no model folder {model}; give a folder or a Hugging Face id")
        if options.device and not Path(model).is_dir():
            raise ValueError(f"an estimate reads the sizes of {model} from its files; give its folder")


# ---- reporting -------------------------------------------------------------------------------------------


def report(found: choice.Choice, options: argparse.Namespace) -> None:
    costs = (
        f"costs: estimates for {options.device} of the emulator's cost model; nothing was run on a Gaudi"
        if options.device
        else f"costs: medians of steps timed on device {choose_device()}, {options.turns} turns with drafts and without"
    )
    answer = {"model": options.model, "costs": costs, **found.as_json(options.model)}
    written = json.dumps(answer, indent=2) + "\n"
    drawn = chart.draw(found, f"How far to speculate: {options.model}", costs)
    files.replace(options.out / "choice.json", written.encode())
    files.replace(options.out / "choice.svg", drawn.encode())
    if options.json:
        print(written, end="")
        return
    print(f"\n{choice.tables(found)}\n\n{costs}\n\n{choice.verdict(found, options.model)}")
    print(f"\nwritten to {options.out}: choice.json, choice.svg", flush=True)


def words(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in sorted(set(numbers)))


def main() -> int:
    options = parse_options()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def run() -> None:
        check_models(options)
        found = choice.choose(candidates(options, say), options.batches, options.max_num_seqs)
        report(found, options)

    return exit_status("choose_speculation", run)


if __name__ == "__main__":
    sys.exit(main())
