"""Generate with one speculation method or several, and report the speedup of each."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.devices import DEVICES, describe_device, refuse_unknown_device
from vllm_gaudi_spec.devices.common import host_memory
from vllm_gaudi_spec.environment import keep_engine_in_process, keeps_engine_in_process
from vllm_gaudi_spec.tools.compare import tasks as command_line
from vllm_gaudi_spec.tools.compare.console import show, show_several
from vllm_gaudi_spec.tools.compare.tasks import (
    BASELINE,
    COMPARE,
    COMPARED,
    DEMO,
    PROMPTS,
    TASKS,
    demo_targets,
    draft_model,
    speculative_config,
    tasks_of,
    uses_demo_drafter,
)
from vllm_gaudi_spec.tools.demo_model import demo_model_path
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import Parser
from vllm_gaudi_spec.tools.io.output import until_nobody_reads
from vllm_gaudi_spec.tools.io.prompts import load_prompts
from vllm_gaudi_spec.tools.report import page, record

if TYPE_CHECKING:
    from vllm_gaudi_spec.tools.compare.measure import Run, Setup


OTHER_PROMPTS = 8
TRAINING_PROMPTS = DEMO / "training_prompts.py"
ENOUGH_S = 60.0
"""Seconds after which no further turn begins, so that a slow machine takes fewer turns."""
SHARE_FOR_KV = 0.9
"""Share of free memory, as the default of vLLM's --gpu-memory-utilization."""


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=f"{__doc__}\n\n{command_line.DESCRIPTION}")
    command_line.add_to(parser)
    options = parser.parse_args(arguments)
    options.tasks = tasks_of(options)
    if mistake := command_line.contradiction_in(options) or command_line.file_mistake(options):
        parser.error(mistake)
    return options


class ThresholdMissed(Exception):
    """The task ran, but missed a threshold of its options."""


class Comparison:
    """One command: its options, its device, and its output."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        self.options, self.command = options, command
        # A record on stdout moves the printed text to stderr.
        self.text_output = sys.stderr if options.json == output.STDOUT else sys.stdout
        self.environment = record.environment()
        refuse_unknown_device()
        self.device = describe_device()
        self.failures: dict[str, str] = {}
        self.apart: str | None = None

    def log(self, text: str) -> None:
        print(text, file=self.text_output, flush=True)

    def run(self) -> None:
        self.log(f"device {self.device['device']}, mode {self.device['mode']}")
        check_what_is_there(self.options)
        if self.options.do_profile is not None:
            keep_engine_in_process("--do-profile")
        check_the_platform()
        setup = setup_of(self.options, self.device["device"])
        if len(self.options.tasks) == 1:
            self.one(self.options.tasks[0], setup)
        else:
            self.several(setup)

    def one(self, name: str, setup: Setup) -> None:
        options = self.options
        names = [BASELINE, name] if options.run_base and name != BASELINE else [name]
        runs = self.measured(names, setup)
        if self.failures:
            raise ThresholdMissed(self.failures[name] if name in self.failures else self.all_failures())
        reports = {run.task: run.report for run in runs.values()}
        for report in reports.values():
            show(report, self.device, self.text_output)
        if options.accuracy_rate is not None:
            reports[name]["accuracy"] = gsm8k_accuracy(setup, speculative_config(name, options), options.limit)
            self.log(f"GSM8K accuracy       {reports[name]['accuracy']:.3f}")
        self.write(reports, setup)
        check_what_was_asked(reports[name], options)

    def several(self, setup: Setup) -> None:
        options = self.options
        if left_out := [name for name in COMPARED if COMPARE in options.task and name not in options.tasks]:
            self.log(f"left out, for want of --draft: {', '.join(left_out)}")
        runs = self.measured(options.tasks, setup)
        if BASELINE not in runs:
            raise ThresholdMissed(self.all_failures())
        reports = {name: run.report for name, run in runs.items()}
        show_several(reports, self.device, self.measurement(reports), self.text_output)
        self.write(reports, setup)
        if self.failures:
            raise ThresholdMissed(self.all_failures())
        for name, report in reports.items():
            if name != BASELINE:
                check_what_was_asked(report, options)

    def all_failures(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.failures.items())

    def measured(self, names: Sequence[str], setup: Setup) -> dict[str, Run]:
        """Return the finished runs by task, with their engines closed; tasks that failed are missing."""
        self.apart = self.why_apart()
        together = len(names) > 1 and self.apart is None
        runs = self.side_by_side(names, setup) if together else self.one_by_one(names, setup)
        if (base := runs.get(BASELINE)) is not None:
            for run in runs.values():
                if run is not base:
                    run.against(base)
        for run in runs.values():
            run.close()
        return {name: runs[name] for name in names if name in runs}

    def why_apart(self) -> str | None:
        """Return why engines cannot run side by side, as far as it is known before one is loaded."""
        if not computes_on_the_host(self.device["device"]):
            return "a card belongs to one process"
        return "the engine is in this process" if keeps_engine_in_process() else None

    def side_by_side(self, names: Sequence[str], setup: Setup) -> dict[str, Run]:
        from vllm_gaudi_spec.tools.compare.measure import take_turns, why_not_together

        shared = setup.sharing(len(names), host_memory.for_kv(SHARE_FOR_KV))
        runs: dict[str, Run] = {}
        for name in names:
            self.load(name, shared, runs)
            if list(runs) == [names[0]] == [name] and (
                reason := why_not_together(len(names), host_memory.of_children(), host_memory.free())
            ):
                self.apart = reason
                self.log(f"the engines run one after the other: {reason}")
                runs.pop(name).close()
                return self.one_by_one(names, setup)
        failed = take_turns(list(runs.values()), shared, self.log, ENOUGH_S)
        self.fail(runs, failed)
        for run in runs.values():
            run.finish()
        return runs

    def one_by_one(self, names: Sequence[str], setup: Setup) -> dict[str, Run]:
        """Run the tasks in sequence, the baseline last: its engine stays open to resolve ties."""
        from vllm_gaudi_spec.tools.compare.measure import profiled, take_turns

        runs: dict[str, Run] = {}
        for name in sorted(names, key=lambda name: name == BASELINE):
            self.load(name, setup, runs)
            if (run := runs.get(name)) is None:
                continue
            trace = trace_file(name, self.options)
            with profiled(trace, self.log):
                self.fail(runs, take_turns([run], setup, self.log))
            if name in runs:
                run.finish(trace)
                if name != BASELINE:
                    run.close()
        return runs

    def load(self, name: str, setup: Setup, runs: dict[str, Run]) -> None:
        from vllm_gaudi_spec.tools.compare.measure import Run

        try:
            runs[name] = Run(name, speculative_config(name, self.options), setup, self.log)
        except Exception as error:
            self.fail(runs, {name: error})

    def fail(self, runs: dict[str, Run], failed: dict[str, Exception]) -> None:
        for name, error in failed.items():
            self.failures[name] = in_one_line(error)
            self.log(f"[{name}] failed: {in_one_line(error)}")
            if name in runs:
                runs.pop(name).close()

    def measurement(self, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Describe how speeds were measured; `why_one_by_one` is None if engines ran side by side."""
        return {"turns": max(len(report["seconds"]) for report in reports.values()), "why_one_by_one": self.apart}

    def write(self, reports: dict[str, dict[str, Any]], setup: Setup) -> None:
        options = self.options
        made = record.make(
            command=self.command,
            environment=self.environment,
            device=self.device,
            settings={name: getattr(setup, name) for name in ("model", "dtype", *setup.OPTIONS)},
            measurement=self.measurement(reports),
            tasks=reports,
        )
        output.write_json(made, options.json)
        if options.report:
            page.write([page.Run(options.json or "this run", made)], options.report)
            self.log(f"report: {options.report.absolute()}")


def setup_of(options: argparse.Namespace, device: str) -> Setup:
    from vllm_gaudi_spec.tools.compare.measure import Setup

    return Setup(
        model=target_model(options),
        other_prompts=other_prompts(options),
        prompts=load_prompts(options.prompts, options.num_prompts) if options.prompts else fixed_prompts(options),
        dtype=options.dtype or ("float32" if computes_on_the_host(device) else "auto"),
        **{name: getattr(options, name) for name in Setup.OPTIONS if name != "turns"},
        turns=1 if any(TASKS[name].remembers_answers for name in options.tasks) else options.turns,
    )


def target_model(options: argparse.Namespace) -> str:
    (folder,) = demo_targets(options) if not options.model else (None,)
    return options.model or (str(demo_model_path()) if folder is None else str(DEMO / folder))


def other_prompts(options: argparse.Namespace) -> list[str]:
    """Return prompts unlike those that the demo's drafters were trained on."""
    if not asks_other_prompts(options):
        return []
    written = runpy.run_path(str(TRAINING_PROMPTS))
    questions = written["OUT_OF_TEMPLATE"]
    return [written["as_chat"](question) for question in questions[:: len(questions) // OTHER_PROMPTS]]


def asks_other_prompts(options: argparse.Namespace) -> bool:
    (name, *others) = options.tasks
    return not (others or options.model or options.draft_model) and TASKS[name].was_trained_on_the_prompts


def computes_on_the_host(device: str) -> bool:
    return DEVICES[device].computes_on_host


def check_the_platform() -> None:
    from vllm_gaudi_spec.platforms.base import is_active

    if not is_active():
        raise ValueError("vLLM runs on another platform plugin; unset VLLM_PLUGINS, or set it to gaudi_spec")


def check_what_is_there(options: argparse.Namespace) -> None:
    """Check that files and packages are there, before a model is loaded."""
    for path in demo_files(options):
        if not path.exists():
            raise ValueError(
                f"this installation lacks a part of the demo, {path}; install it again, or give --model and --draft"
            )
    for model in (options.model, *(draft_model(name, options) for name in options.tasks)):
        if model and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            raise ValueError(f"there is no model folder {model}; give a folder or a Hugging Face id")
    if options.accuracy_rate is not None and importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--accuracy-rate needs lm-eval: pip install lm-eval, or leave it out")


def demo_files(options: argparse.Namespace) -> list[Path]:
    """Return the files of this package that the tasks read."""
    drafters = [draft_model(name, options) for name in options.tasks if uses_demo_drafter(name, options)]
    targets = [] if options.model else [DEMO / folder for folder in demo_targets(options) if folder]
    return [*map(Path, filter(None, drafters)), *targets, *([TRAINING_PROMPTS] if asks_other_prompts(options) else [])]


def fixed_prompts(options: argparse.Namespace) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(options.num_prompts or options.batch_size)]


def trace_file(name: str, options: argparse.Namespace) -> Path | None:
    if options.do_profile is None:
        return None
    beside = Path(options.json).parent if options.json else Path()
    folder = beside if options.do_profile == Path() else options.do_profile
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"trace_{name}.json.gz"


def check_what_was_asked(report: dict[str, Any], options: argparse.Namespace) -> None:
    if (asked := options.assert_accept_rate) is not None:
        rate = report["acc_rate"]
        if rate is None:
            raise ThresholdMissed(f"nothing was drafted, and --assert-accept-rate asks for {asked}")
        if rate < asked:
            raise ThresholdMissed(f"acc_rate {rate:.3f} is below the {asked} of --assert-accept-rate")
    if (asked := options.accuracy_rate) is not None and report["accuracy"] < asked:
        raise ThresholdMissed(f"GSM8K accuracy {report['accuracy']:.3f} is below the {asked} of --accuracy-rate")


# ---- GSM8K -------------------------------------------------------------------------------------------------


TASK = "gsm8k"
QUESTION_TOKENS = 2048  # five worked examples and a question


def gsm8k_accuracy(setup: Setup, config: dict[str, Any] | None, limit: int | None) -> float:
    """Return the share of GSM8K questions whose last number is right, by lm-eval, with an engine of its own.

    Neither lm-eval nor its data come with this project, and this was not run with them.
    """
    from lm_eval import simple_evaluate

    engine = setup.engine_options(config)
    options = {
        "pretrained": engine.pop("model"),
        "batch_size": "auto",
        **engine,
        "max_model_len": QUESTION_TOKENS + setup.osl,
    }
    if config is None:
        del options["speculative_config"]
    try:
        found = simple_evaluate(model="vllm", model_args=options, tasks=[TASK], limit=limit)
    except (OSError, ConnectionError) as error:
        raise ValueError(f"GSM8K is not to be had here ({error}); leave out --accuracy-rate") from error
    return float(found["results"][TASK]["exact_match,flexible-extract"])


# ---- the command ----------------------------------------------------------------------------------------


def main(arguments: Sequence[str], command: Sequence[str]) -> int:
    """Run the command; `command` is what a user types before the arguments to run it again."""
    options = parse_options(arguments)
    return until_nobody_reads(lambda: run(options, [*command, *arguments]))


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    try:
        Comparison(options, command).run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        print(f"error: task {' '.join(options.task)} failed: {in_one_line(error)}", file=sys.stderr, flush=True)
        return 1
    return 0
