"""Find out how far to speculate: the method, k and batch-size schedule that give most tokens a second.

python calibration/choose_speculation.py MODEL --draft draft_model=DRAFTER --draft eagle=HEAD --batches 1 4 16

For each drafter and k an engine answers the prompts, which says how far drafts are accepted, and times its steps with
drafts and without in turns, at each batch size. With --device gaudi2 or gaudi3 no step is timed: costs are estimates of
the emulator's cost model, and one engine a drafter measures acceptance. Nothing here was run on a Gaudi.

Written to --output: choice.json with the arguments for `vllm serve`, choice.svg, and each engine's answers, which are
kept: the command goes on where it was interrupted, and measures anew what changed. ngram is always a candidate.

Exit status: 0 when there is an answer (also that speculation does not pay), 1 when something failed, 2 for options that
make no sense.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.backends import choose_device
from vllm_gaudi_spec.config import MAX_DRAFTS, METHODS, MTP, UNIVERSAL_DRAFT, WEIGHTLESS_METHODS
from vllm_gaudi_spec.tuning import chart, choice
from vllm_gaudi_spec.tuning.cases import Answer, Cases, fingerprint
from vllm_gaudi_spec.tuning.choice import Candidate
from vllm_gaudi_spec.tuning.prompts import load_prompts

NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
NEED_NO_MODEL = (*WEIGHTLESS_METHODS, MTP)
GENERATIONS = ("gaudi2", "gaudi3")


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
    add("--num_prompts", type=positive, metavar="N", help="the first N of them")
    add("--drafts", type=positive, nargs="+", default=[1, 2, 3, 4, 5], metavar="K", help="numbers of drafts to try")
    add("--batches", type=positive, nargs="+", default=[1, 4, 16], metavar="B", help="batch sizes to be served")
    add("--max_num_seqs", type=positive, metavar="N", help="of the server (default: the largest of --batches)")
    add("--tokens", type=positive, default=64, help="of each prompt's answer, past any end token")
    add("--temperature", type=float, default=0.0)
    add("--turns", type=positive, default=3, metavar="N", help="with drafts and without, at each batch size")
    add("--device", choices=GENERATIONS, help="estimate this card's costs instead of timing steps here")
    add("--one_run", action="store_true", help="with --device: tell smaller k from the run with the largest")
    add("--context", type=positive, metavar="N", help="with --device: tokens of KV a request (default: as the prompts)")
    add("--speculative", type=json_object, default={}, metavar="JSON", help="more of speculative_config, for all")
    add(
        "--engine",
        type=json_object,
        default={},
        metavar="JSON",
        help='more options of LLM(...), as {"dtype": "float32"}',
    )
    add("--output", type=Path, default=Path(".calibration/speculation"), metavar="FOLDER")
    add("--json", action="store_true", help="print choice.json instead of tables")
    options = parser.parse_args()
    if contradiction := contradiction_in(options):
        parser.error(contradiction)
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return value


def contradiction_in(options: argparse.Namespace) -> str | None:
    if max(options.drafts) > MAX_DRAFTS:
        return f"--drafts: a step verifies at most {MAX_DRAFTS} drafts, not {max(options.drafts)}"
    if options.max_num_seqs and options.max_num_seqs < max(options.batches):
        return f"--max_num_seqs {options.max_num_seqs} is less than a batch of {max(options.batches)}"
    if not options.device and (options.one_run or options.context):
        return "--one_run and --context are for --device"
    if options.tokens < 2:
        return "--tokens: the first token is the prompt's, so 2 at least"
    return None


# ---- measuring -------------------------------------------------------------------------------------------


def candidates(options: argparse.Namespace, say: Any) -> list[Candidate]:
    prompts = load_prompts(options.prompts, options.num_prompts)
    drafters = [*options.draft, *(drafter for drafter in [Drafter.parse("ngram")] if drafter not in options.draft)]
    cases = Cases(options.output, say)
    find = estimated if options.device else timed
    return [found for drafter in drafters for found in find(drafter, prompts, cases, options, say)]


def timed(drafter: Drafter, prompts: list[str], cases: Cases, options: argparse.Namespace, say: Any) -> list[Candidate]:
    found = []
    for drafts in sorted(set(options.drafts)):
        say(f"{drafter.name}, k = {drafts}: acceptance, and steps at batch {words(options.batches)}")
        task = task_of(drafter, drafts, prompts, options) | {"asked": [drafts], "batches": sorted(set(options.batches))}
        answer = cases.answer(f"{drafter.name}-{drafts}", task)
        found.append(Candidate(drafter.name, config_of(drafter, options), answer.acceptance[drafts], answer.costs))
    return found


def estimated(
    drafter: Drafter, prompts: list[str], cases: Cases, options: argparse.Namespace, say: Any
) -> list[Candidate]:
    drafts = sorted(set(options.drafts))
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
            tuple(estimate(drafter, num, batch, answer, options) for batch in sorted(set(options.batches))),
        )
        for num in drafts
    ]


def estimate(drafter: Drafter, drafts: int, batch: int, answer: Answer, options: argparse.Namespace) -> Any:
    # Not before there is a use for it: the cost model takes torch along.
    from vllm_gaudi_spec.tuning import estimates

    model = drafter.config.get("model")
    return estimates.estimate(
        target=Path(options.model),
        method=drafter.name,
        drafter=Path(model) if model else None,
        num_drafts=drafts,
        batch=batch,
        context=options.context or answer.context,
        generation=options.device,
    )


def task_of(drafter: Drafter, drafts: int, prompts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All that an answer depends on."""
    return {
        "model": options.model,
        "speculative": {**config_of(drafter, options), "num_speculative_tokens": drafts},
        "prompts": prompts,
        "tokens": options.tokens,
        "temperature": options.temperature,
        "turns": options.turns,
        "max_num_seqs": max(options.batches),
        "engine": options.engine,
        "device": choose_device(),
        "files": [fingerprint(options.model), fingerprint(drafter.config.get("model", ""))],
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
    (options.output / "choice.json").write_text(written)
    (options.output / "choice.svg").write_text(chart.draw(found, f"How far to speculate: {options.model}", costs))
    if options.json:
        print(written, end="")
        return
    print(f"\n{choice.tables(found)}\n\n{costs}\n\n{choice.verdict(found, options.model)}")
    print(f"\nwritten to {options.output}: choice.json, choice.svg", flush=True)


def words(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in sorted(set(numbers)))


def main() -> int:
    options = parse_options()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        check_models(options)
        found = choice.choose(candidates(options, say), options.batches, options.max_num_seqs)
        report(found, options)
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
