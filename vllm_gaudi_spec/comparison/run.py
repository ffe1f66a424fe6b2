"""Generate with one way of drafting, or several, and report what each gained."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec import output_files
from vllm_gaudi_spec.backends import describe_device, refuse_unknown_device
from vllm_gaudi_spec.comparison import options as command_line
from vllm_gaudi_spec.comparison.console import show, show_several
from vllm_gaudi_spec.comparison.prompts import prompts_in
from vllm_gaudi_spec.comparison.tasks import (
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
from vllm_gaudi_spec.demo_model import demo_model_path
from vllm_gaudi_spec.environment import keep_engine_in_process
from vllm_gaudi_spec.one_line import in_one_line
from vllm_gaudi_spec.report import page, record
from vllm_gaudi_spec.terminal import until_nobody_reads

if TYPE_CHECKING:
    from vllm_gaudi_spec.comparison.measure import Run, Setup

OTHER_PROMPTS = 8


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n\n{command_line.DESCRIPTION}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_to(parser)
    options = parser.parse_args(arguments)
    options.tasks = tasks_of(options)
    if mistake := command_line.contradiction_in(options) or command_line.file_mistake(options):
        parser.error(mistake)
    return options


class Missed(Exception):
    """The task ran, but not as well as was asked."""


class Comparison:
    """One command: what was asked, on which device, and where it is told."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        self.options, self.command = options, command
        # What is printed of a run in words makes room for a record on stdout.
        self.words = sys.stderr if options.json == output_files.STDOUT else sys.stdout
        self.environment = record.environment()
        refuse_unknown_device()
        self.device = describe_device()

    def say(self, text: str) -> None:
        print(text, file=self.words, flush=True)

    def run(self) -> None:
        self.say(f"device {self.device['device']}, mode {self.device['mode']}")
        check_what_is_there(self.options)
        if self.options.do_profile is not None:
            keep_engine_in_process("--do_profile")
        check_the_platform()
        setup = setup_of(self.options, self.device["device"])
        if len(self.options.tasks) == 1:
            self.one(self.options.tasks[0], setup)
        else:
            self.several(setup)

    def one(self, name: str, setup: Setup) -> None:
        from vllm_gaudi_spec.comparison.measure import compare, measure

        options, config = self.options, speculative_config(name, self.options)
        run = measure(name, config, setup, self.say, trace=trace_file(name, options))
        reports = {name: run.report}
        if options.run_base and name != BASELINE:
            run.close()  # two engines at once would compete for the device
            base = measure(BASELINE, None, setup, self.say)
            run.report["matches_baseline"] = compare(base, run, options.temperature)
            reports = {BASELINE: base.report, **reports}
            base.close()
        for report in reports.values():
            show(report, self.device, self.words)
        if options.accuracy_rate is not None:
            from vllm_gaudi_spec.comparison.accuracy import gsm8k_accuracy

            run.close()
            gc.collect()
            run.report["accuracy"] = gsm8k_accuracy(setup, config, options.limit)
            self.say(f"GSM8K accuracy       {run.report['accuracy']:.3f}")
        self.write(reports, setup)
        check_what_was_asked(run.report, options)

    def several(self, setup: Setup) -> None:
        """One after the other, since two engines at once would compete for the device."""
        from vllm_gaudi_spec.comparison.measure import compare, measure

        options = self.options
        if left_out := [name for name in COMPARED if COMPARE in options.task and name not in options.tasks]:
            self.say(f"left out, for want of --draft_model: {', '.join(left_out)}")
        runs, failures = self.drafting_runs(setup)
        # The baseline comes last: its engine is asked about ties between candidates.
        base = measure(BASELINE, None, setup, self.say, trace=trace_file(BASELINE, options))
        for run in runs:
            run.report["matches_baseline"] = compare(base, run, options.temperature)
        base.close()
        reports = {run.report["task"]: run.report for run in (base, *runs)}
        show_several(reports, self.device, self.words)
        self.write(reports, setup)
        if failures:
            raise Missed("; ".join(failures))
        for run in runs:
            check_what_was_asked(run.report, options)

    def drafting_runs(self, setup: Setup) -> tuple[list[Run], list[str]]:
        """A task that fails is reported in the end; the others have their line in the table all the same."""
        from vllm_gaudi_spec.comparison.measure import measure

        runs, failures = [], []
        for name in self.options.tasks:
            if TASKS[name].method is None:
                continue
            config, trace = speculative_config(name, self.options), trace_file(name, self.options)
            try:
                runs.append(measure(name, config, setup, self.say, trace=trace))
                runs[-1].close()
            except Exception as error:
                failures.append(f"{name}: {in_one_line(error)}")
                self.say(f"[{name}] failed: {in_one_line(error)}")
        return runs, failures

    def write(self, reports: dict[str, dict[str, Any]], setup: Setup) -> None:
        options = self.options
        made = record.make(
            command=self.command,
            environment=self.environment,
            device=self.device,
            settings={name: getattr(setup, name) for name in ("model", "dtype", *setup.OPTIONS)},
            tasks=reports,
        )
        output_files.write_json(made, options.json)
        if options.report:
            page.write([page.Run(options.json or "this run", made)], options.report)
            self.say(f"report: {options.report.absolute()}")


def setup_of(options: argparse.Namespace, device: str) -> Setup:
    from vllm_gaudi_spec.comparison.measure import Setup

    return Setup(
        model=target_model(options),
        other_prompts=other_prompts(options),
        prompts=prompts_in(options.prompts) if options.prompts else fixed_prompts(options),
        dtype=options.dtype or ("float32" if computes_on_the_host(device) else "auto"),
        **{name: getattr(options, name) for name in Setup.OPTIONS},
    )


def target_model(options: argparse.Namespace) -> str:
    (folder,) = demo_targets(options) if not options.model else (None,)
    return options.model or (str(demo_model_path()) if folder is None else str(DEMO / folder))


def other_prompts(options: argparse.Namespace) -> list[str]:
    """Some that the demo's drafters were not trained on, nor on any of their form."""
    (name, *others) = options.tasks
    if others or options.model or options.draft_model or not TASKS[name].was_trained_on_the_prompts:
        return []
    written = runpy.run_path(str(DEMO / "training_prompts.py"))
    questions = written["OUT_OF_TEMPLATE"]
    return [written["as_chat"](question) for question in questions[:: len(questions) // OTHER_PROMPTS]]


def computes_on_the_host(device: str) -> bool:
    return device == "cpu" or device.endswith("-emulated")


def check_the_platform() -> None:
    from vllm_gaudi_spec.platform import is_active

    if not is_active():
        raise ValueError("vLLM runs on another platform plugin; unset VLLM_PLUGINS, or set it to gaudi_spec")


def check_what_is_there(options: argparse.Namespace) -> None:
    """Before a model is loaded."""
    if any(uses_demo_drafter(name, options) for name in options.tasks) and not DEMO.is_dir():
        raise ValueError(
            f"the demo's drafters come with the project's checkout, and there is no {DEMO}; run this there, or give "
            "--model and --draft_model"
        )
    for model in (options.model, *(draft_model(name, options) for name in options.tasks)):
        if model and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            raise ValueError(f"there is no model folder {model}; give a folder or a Hugging Face id")
    if options.accuracy_rate is not None and importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--accuracy_rate needs lm-eval: pip install lm-eval, or leave it out")


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
            raise Missed(f"nothing was drafted, and --assert_accept_rate asks for {asked}")
        if rate < asked:
            raise Missed(f"acc_rate {rate:.3f} is below the {asked} of --assert_accept_rate")
    if (asked := options.accuracy_rate) is not None and report["accuracy"] < asked:
        raise Missed(f"GSM8K accuracy {report['accuracy']:.3f} is below the {asked} of --accuracy_rate")


def main(arguments: Sequence[str], command: Sequence[str]) -> int:
    """`command`: the words before the arguments, as a user would type them again."""
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
