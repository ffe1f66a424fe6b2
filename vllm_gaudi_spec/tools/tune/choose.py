"""The choice of `gaudi-spec tune`: candidates, measured or estimated, and the fastest of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY
from vllm_gaudi_spec.devices import choose_device
from vllm_gaudi_spec.environment import quant_config_path
from vllm_gaudi_spec.quantization.fingerprint import fingerprint
from vllm_gaudi_spec.tools.io import output_files
from vllm_gaudi_spec.tools.io.prompts import load_prompts
from vllm_gaudi_spec.tools.io.terminal import counting
from vllm_gaudi_spec.tools.report import page, record
from vllm_gaudi_spec.tools.tune import choice
from vllm_gaudi_spec.tools.tune.cases import Cases
from vllm_gaudi_spec.tools.tune.choice import Candidate
from vllm_gaudi_spec.tools.tune.costs import StepCost
from vllm_gaudi_spec.tools.tune.drafters import Drafter
from vllm_gaudi_spec.tools.tune.folder import write_json
from vllm_gaudi_spec.tools.tune.steps import exit_status

Log = Callable[[str], None]


# ---- measuring -------------------------------------------------------------------------------------------


def candidates(options: argparse.Namespace, log: Log) -> list[Candidate]:
    prompts = load_prompts(options.prompts, options.limit)
    drafters = [*options.draft, *(drafter for drafter in [Drafter.parse("ngram")] if drafter not in options.draft)]
    if options.card:
        for drafter in drafters:  # what cannot be estimated is refused before acceptance is measured
            estimate(drafter, 1, 1, options.context or 1, options)
        with counting("engines", len(drafters)) as more:
            cases = Cases(options.out, log, more)
            return [found for drafter in drafters for found in estimated(drafter, prompts, cases, options, log)]
    with counting("engines", len(drafters) * len(set(options.num_drafts)) + times_plain_engine()) as more:
        cases = Cases(options.out, log, more)
        plain = timed_without_drafts(prompts, cases, options, log)
        return [found for drafter in drafters for found in timed(drafter, prompts, plain, cases, options, log)]


def times_plain_engine() -> bool:
    """On an asynchronous device the host's clock cannot separate the drafter from a plain step, so plain steps are
    timed in an engine without a drafter."""
    return choose_device() != "cpu"


def timed_without_drafts(
    prompts: list[str], cases: Cases, options: argparse.Namespace, log: Log
) -> dict[int, StepCost] | None:
    if not times_plain_engine():
        return None
    log(f"no drafter: steps at batch {words(sizes(options))}")
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
    log: Log,
) -> list[Candidate]:
    found = []
    for drafts in sorted(set(options.num_drafts)):
        log(f"{drafter.name}, k = {drafts}: acceptance, and steps at batch {words(sizes(options))}")
        task = task_of(drafter, drafts, prompts, options) | {"asked": [drafts], "batches": sizes(options)}
        answer = cases.answer(f"{drafter.name}-{drafts}", task)
        costs = answer.costs
        if plain is not None:
            costs = tuple(replace(cost, plain_s=plain[cost.batch].plain_s) for cost in costs)
        found.append(Candidate(drafter.name, config_of(drafter, options), answer.acceptance[drafts], costs))
    return found


def estimated(
    drafter: Drafter, prompts: list[str], cases: Cases, options: argparse.Namespace, log: Log
) -> list[Candidate]:
    drafts = sorted(set(options.num_drafts))
    log(f"{drafter.name}, k = {words(drafts)}: acceptance")
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
    from vllm_gaudi_spec.tools.estimate.times import Pair

    model = drafter.config.get("model")
    pair = Pair.of(Path(options.model), drafter.name, Path(model) if model else None, drafts)
    part = (batch, context, options.card)
    return StepCost(
        batch=batch, plain_s=pair.plain_s(*part), verify_s=pair.verify_s(*part), draft_s=pair.draft_s(*part)
    )


def task_of(drafter: Drafter | None, drafts: int, prompts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All that an answer depends on, also what the engine finds out itself. No drafter: the task of a plain engine."""
    speculative = config_of(drafter, options) | {"num_speculative_tokens": drafts} if drafter else None
    spec_options = (options.engine.get("additional_config") or {}).get(ADDITIONAL_CONFIG_KEY, {})
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
            Path(path).read_text() for path in (quant_config_path(), spec_options.get("draft_quant_config")) if path
        ],
        "versions": [version(package) for package in ("vllm-gaudi-spec", "torch")],
    }


def config_of(drafter: Drafter, options: argparse.Namespace) -> dict[str, Any]:
    return drafter.config | options.speculative


def check_estimates(options: argparse.Namespace) -> None:
    """Before an engine is started."""
    for model in (options.model, *(drafter.config["model"] for drafter in options.draft if "model" in drafter.config)):
        if options.card and not Path(model).is_dir():
            raise ValueError(f"an estimate reads the sizes of {model} from its files; give its folder")


# ---- reporting -------------------------------------------------------------------------------------------


def report(found: choice.Choice, options: argparse.Namespace) -> None:
    costs = (
        f"costs: estimates for {options.card} of the emulator's cost model; nothing was run on a Gaudi"
        if options.card
        else f"costs: medians of steps timed on device {choose_device()}, {options.turns} turns with drafts and without"
    )
    head = {"format": record.CHOICE, "version": record.VERSION, "model": options.model, "costs": costs}
    answer = {**head, **found.as_json(options.model)}
    write_json(options.out / "choice.json", answer)
    page.write([page.Run("choice.json", answer)], options.out / "choice.html")
    output_files.write_json(answer, options.json)
    if options.json == output_files.STDOUT:
        return
    print(f"\n{choice.tables(found)}\n\n{costs}\n\n{choice.conclusion(found, options.model)}")
    print(f"\nwritten to {options.out}: choice.json, choice.html", flush=True)


def words(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in sorted(set(numbers)))


def main(options: argparse.Namespace) -> int:
    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def run() -> None:
        check_estimates(options)
        found = choice.choose(candidates(options, log), options.batches, options.max_num_seqs)
        report(found, options)

    return exit_status("gaudi-spec tune", run)
