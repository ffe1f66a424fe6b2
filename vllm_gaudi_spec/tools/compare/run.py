"""Generates text with one or more speculation methods and reports the speedup of each method.

When run as a program, this module is the engine process of `gaudi-spec demo`, which has set its environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.device_table import DEVICES, describe_device, refuse_unknown_device
from vllm_gaudi_spec.devices.common import host_memory
from vllm_gaudi_spec.environment import keep_engine_in_process, keeps_engine_in_process
from vllm_gaudi_spec.tools.compare import tasks as command_line
from vllm_gaudi_spec.tools.compare.tasks import (
    BASELINE,
    COMPARE,
    COMPARED,
    DEMO,
    PROMPTS,
    TASKS,
    find_demo_targets,
    find_draft_model,
    list_tasks,
    make_speculative_config,
)
from vllm_gaudi_spec.tools.demo_model import demo_model_path
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import Parser
from vllm_gaudi_spec.tools.io.prompts import load_prompts
from vllm_gaudi_spec.tools.report import page, record

if TYPE_CHECKING:
    from vllm_gaudi_spec.tools.compare.measure import Run, Setup


ENOUGH_S = 60.0
"""Number of seconds after which no further turn starts. A slow machine therefore runs fewer turns."""
SHARE_FOR_KV = 0.9
"""Fraction of the free memory to use. It equals vLLM's default for --gpu-memory-utilization."""


class TaskFailed(Exception):
    """Raised if a task failed or did not reach the threshold given in the options."""


class Comparison:
    """The options, device, and output of a command."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        self.options, self.command = options, command
        # If a record is written to stdout, text is printed to stderr instead.
        self.text_output = sys.stderr if options.json == output.STDOUT else sys.stdout
        self.environment = record.read_environment()
        refuse_unknown_device()
        self.device = describe_device()
        self.failures: dict[str, str] = {}
        self.why_one_by_one: str | None = None

    def log(self, text: str) -> None:
        print(text, file=self.text_output, flush=True)

    def run(self) -> None:
        options = self.options
        self.log(f"device {self.device['device']}, mode {self.device['mode']}")
        check_installation(options)
        if options.do_profile is not None:
            keep_engine_in_process("--do-profile")
        setup = make_setup(options, computes_on_host=DEVICES[self.device["device"]].computes_on_host)
        names = options.tasks
        if COMPARE in options.task and (left_out := [name for name in COMPARED if name not in names]):
            self.log(f"skipped, because --draft is missing: {', '.join(left_out)}")
        if options.run_base and BASELINE not in names:
            names = [BASELINE, *names]
        runs = self.measure(names, setup)
        if not runs or (len(names) > 1 and BASELINE not in runs):
            raise TaskFailed(self.describe_failures())
        reports = {name: run.report for name, run in runs.items()}
        made = record.make(
            command=self.command,
            environment=self.environment,
            device=self.device,
            settings={name: getattr(setup, name) for name in ("model", "dtype", *setup.OPTIONS)},
            measurement={
                "turns": max(len(report["seconds"]) for report in reports.values()),
                "why_one_by_one": self.why_one_by_one,
            },
            tasks=reports,
        )
        show(made, self.text_output)
        output.write_json(made, options.json)
        if options.report:
            page.write([page.Run(options.json or "this run", made)], options.report)
            self.log(f"report: {options.report.absolute()}")
        if self.failures:
            raise TaskFailed(self.describe_failures())
        for report in reports.values():
            check_acceptance_rate(report, options.assert_accept_rate)

    def describe_failures(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())

    def measure(self, names: Sequence[str], setup: Setup) -> dict[str, Run]:
        """Return finished runs by task, with their engines closed."""
        if not DEVICES[self.device["device"]].computes_on_host:
            self.why_one_by_one = "a card belongs to one process"
        elif keeps_engine_in_process():
            self.why_one_by_one = "the engine is in this process"
        is_shared = len(names) > 1 and self.why_one_by_one is None
        runs = self.run_side_by_side(names, setup) if is_shared else self.run_one_by_one(names, setup)
        if (base := runs.get(BASELINE)) is not None:
            for run in runs.values():
                if run is not base:
                    run.compare_with(base)
        for run in runs.values():
            run.close()
        return {name: runs[name] for name in names if name in runs}

    def run_side_by_side(self, names: Sequence[str], setup: Setup) -> dict[str, Run]:
        from vllm_gaudi_spec.tools.compare.measure import explain_lack_of_memory, take_turns

        shared = setup.sharing(len(names), host_memory.choose_kv_bytes(SHARE_FOR_KV))
        runs: dict[str, Run] = {}
        for name in names:
            self.load(name, shared, runs)
            if list(runs) == [names[0]] == [name] and (
                reason := explain_lack_of_memory(len(names), _measure_children(), host_memory.free())
            ):
                self.why_one_by_one = reason
                self.log(f"the engines run one after the other: {reason}")
                runs.pop(name).close()
                return self.run_one_by_one(names, setup)
        self.drop(runs, take_turns(list(runs.values()), shared, self.log, ENOUGH_S))
        for run in runs.values():
            run.finish()
        return runs

    def run_one_by_one(self, names: Sequence[str], setup: Setup) -> dict[str, Run]:
        """Run tasks one after another, with the baseline last, because its engine stays open to detect ties."""
        from vllm_gaudi_spec.tools.compare.measure import profile_to, take_turns

        runs: dict[str, Run] = {}
        for name in sorted(names, key=lambda name: name == BASELINE):
            self.load(name, setup, runs)
            if (run := runs.get(name)) is None:
                continue
            trace = name_trace(name, self.options)
            with profile_to(trace):
                self.drop(runs, take_turns([run], setup, self.log))
            if name in runs:
                run.finish(trace)
                if name != BASELINE:
                    run.close()
        return runs

    def load(self, name: str, setup: Setup, runs: dict[str, Run]) -> None:
        from vllm_gaudi_spec.tools.compare.measure import Run

        try:
            runs[name] = Run(name, make_speculative_config(name, self.options), setup, self.log)
        except Exception as error:
            self.drop(runs, {name: error})

    def drop(self, runs: dict[str, Run], failed: dict[str, Exception]) -> None:
        for name, error in failed.items():
            self.failures[name] = in_one_line(error)
            self.log(f"[{name}] failed: {in_one_line(error)}")
            if name in runs:
                runs.pop(name).close()


def make_setup(options: argparse.Namespace, *, computes_on_host: bool) -> Setup:
    from vllm_gaudi_spec.tools.compare.measure import Setup

    model = options.model
    if not model:
        (folder,) = find_demo_targets(options)
        model = demo_model_path() if folder is None else str(DEMO / folder)
    if options.prompts:
        prompts = load_prompts(options.prompts, options.num_prompts)
    else:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(options.num_prompts or options.batch_size)]
    return Setup(
        model=model,
        prompts=prompts,
        dtype=options.dtype or ("float32" if computes_on_host else "auto"),
        **{name: getattr(options, name) for name in Setup.OPTIONS if name != "turns"},
        turns=1 if any(TASKS[name].remembers_answers for name in options.tasks) else options.turns,
    )


def check_installation(options: argparse.Namespace) -> None:
    """Check the models, the demo's files, and the platform before any model is loaded."""
    from vllm_gaudi_spec.platforms.base import is_active

    drafters = [find_draft_model(name, options) for name in options.tasks]
    demo = [Path(str(drafter)) for drafter in drafters if drafter and Path(drafter).is_relative_to(DEMO)]
    if not options.model:
        demo += [DEMO / folder for folder in find_demo_targets(options) if folder]
    if missing := [str(path) for path in demo if not path.exists()]:
        raise ValueError(
            f"{missing[0]}, a part of the demo, is missing from this installation; install it again, or pass --model "
            "and --draft"
        )
    if mistake := output.find_model_mistake(options.model, *drafters):
        raise ValueError(mistake)
    if not is_active():
        raise ValueError("vLLM runs on another platform plugin; unset VLLM_PLUGINS, or set it to gaudi_spec")


def name_trace(name: str, options: argparse.Namespace) -> Path | None:
    if options.do_profile is None:
        return None
    folder: Path = options.do_profile
    if folder == Path() and options.json:
        folder = Path(options.json).parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"trace_{name}.json.gz"


def check_acceptance_rate(report: dict[str, Any], minimum: float | None) -> None:
    if minimum is None or not report["k"]:
        return
    if (rate := report["acc_rate"]) is None:
        raise TaskFailed(f"nothing was drafted, but --assert-accept-rate is {minimum}")
    if rate < minimum:
        raise TaskFailed(f"acc_rate {rate:.3f} is below --assert-accept-rate {minimum}")


# ---- the printed table -------------------------------------------------------------------------------------


MAX_TEXTS = 8
TEXT_WIDTH = 100
COLUMNS = (
    "task",
    "tokens/s",
    "speedup",
    "quartiles",
    "acceptance length",
    "all steps",
    "acceptance rate",
    "same text as baseline",
)


def show(made: dict[str, Any], file: TextIO) -> None:
    """Print the texts of the first task, and a table with one line per task."""

    def write(text: str) -> None:
        print(text, file=file, flush=True)

    reports, device, settings = made["tasks"], made["device"], made["settings"]
    name, first = next(iter(reports.items()))
    write(f"\nGenerated text ({name}):")
    for answer in first["answers"][:MAX_TEXTS]:
        text = answer["prompt"] + "".join(answer["pieces"])
        write(f"  {text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 3] + '...'!r}")
    write(f"\n=== device {device['device']}, mode {device['mode']} ===")
    k = max(report["k"] for report in reports.values())
    write(f"k {k}, {len(first['answers'])} prompts, concurrency {settings['batch_size']}\n")
    output.show_table(COLUMNS, [make_row(report) for report in reports.values()], file)
    write("")
    if len(reports) > 1:
        write(record.describe_measurement(made["measurement"]))
        write("speedup: median of the time without speculation divided by the task's time, prompt by prompt.")
    write("acceptance length: mean tokens per step with drafts, and over all steps; neither depends on the machine.")
    if device["device"] == "cpu":
        write("On a CPU, the speedup is largest at concurrency 1; at 8, drafting often costs more than it saves.")
    write("")


def make_row(report: dict[str, Any]) -> tuple[str, ...]:
    rate, matches, speedup = report["acc_rate"], report["matches_baseline"], report["speedup"]
    return (
        report["task"],
        f"{report['tokens_per_s']:.1f}",
        f"{speedup['ratio']:.2f}" if speedup else "1.00" if report["task"] == BASELINE else "-",
        "{low:.2f} to {high:.2f}".format(**speedup) if speedup else "-",
        f"{record.compute_acceptance_length(report):.2f}",
        f"{report['tokens_per_step']:.2f}",
        "-" if rate is None else f"{rate:.3f}",
        ", ".join(f"{number} {name}" for name, number in matches.items()) if matches else "-",
    )


# ---- the command ----------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=f"{__doc__}\n\n{command_line.DESCRIPTION}")
    command_line.add_to(parser)
    options = parser.parse_args(arguments)
    options.tasks = list_tasks(options)
    if mistake := command_line.find_mistake(options):
        parser.error(mistake)
    return options


def _measure_children() -> int:
    """Return the number of bytes of memory used only by child processes."""
    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


def main(arguments: Sequence[str], command: Sequence[str]) -> int:
    """Run the command. In the command to repeat the run, `command` precedes the arguments."""
    options = parse_options(arguments)

    def work() -> int:
        try:
            Comparison(options, [*command, *arguments]).run()
        except BrokenPipeError:
            raise
        except Exception as error:
            print(f"error: task {' '.join(options.task)} failed: {in_one_line(error)}", file=sys.stderr, flush=True)
            return output.PROBLEMS
        return output.FINE

    return output.guard(command[-1], work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], command=("gaudi-spec", "demo")))
