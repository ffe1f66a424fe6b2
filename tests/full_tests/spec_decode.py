"""Generate with one way of drafting, or several, and report what each gained; the script that users run.

PT_HPU_LAZY_MODE=1 python tests/full_tests/spec_decode.py --task ngram --osl 512
PT_HPU_LAZY_MODE=1 python tests/full_tests/spec_decode.py --task compare --osl 64

Several tasks run one after the other, and end in one table beside the baseline; `compare` stands for baseline, ngram,
draft_model and universal. Without --model the target is the demo model, and --draft_model may be left out: its drafters
are in demo/. For eagle3, medusa and mtp the demo has a tiny model of its own, which says little but drafts well. With a
model of your own and no --draft_model, `compare` leaves out what needs one; mtp drafts with the model itself.

A drafter of the demo model was trained on the fixed prompts. Where it is the only task, its report has a second rate,
on prompts that have nothing to do with its training.

Exit status: 0 when the task ran and met what was asked of it, 1 when it failed (the last line says why), 2 for options
that make no sense. --accuracy_rate needs lm-eval and its data from outside and has not been tried with them.
"""

import argparse
import gc
import importlib.util
import json
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The modules beside this one: a script's own folder comes first in the search path.
from repetitive import repetitive_prompts
from spec_accuracy import gsm8k_accuracy
from spec_measure import Run, Setup, compare, measure, stay_in_process
from spec_report import show, show_table

from vllm_gaudi_spec.argument_types import positive
from vllm_gaudi_spec.backends import describe_device
from vllm_gaudi_spec.demo_model import demo_model_path

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "San Francisco is know for its",  # spelled as in the set that published figures use
    "Facebook was created in 2004 by",
    "Curious George is a",
    "Python 3.11 brings improvements to its",
]


@dataclass(frozen=True)
class Task:
    method: str | None
    """vLLM's name for the way of drafting; none for the baseline."""
    options: tuple[str, ...] = ()
    """Options of this script that go to vLLM under the same name."""
    demo_drafter: str | None = None
    """The folder under demo/ that drafts for the demo's target; set for tasks that need a draft model."""
    demo_target: str | None = None
    """The folder under demo/ that is the target, where it is not the demo model."""
    demo_drafts: int | None = None
    """How many drafts the demo's drafter can make at most, where there is an end to it."""

    @property
    def needs_draft_model(self) -> bool:
        return self.demo_drafter is not None

    @property
    def was_trained_on_the_prompts(self) -> bool:
        return self.needs_draft_model and self.demo_target is None


TASKS = {
    "baseline": Task(None),
    "ngram": Task("ngram", ("prompt_lookup_min", "prompt_lookup_max")),
    "suffix": Task("suffix"),
    "draft_model": Task("draft_model", demo_drafter="draft-same-vocab"),
    "universal": Task("universal_draft", demo_drafter="draft-other-vocab"),
    "eagle": Task("eagle", demo_drafter="eagle-head"),
    "eagle3": Task("eagle3", demo_drafter="tiny/eagle3", demo_target="tiny/target"),
    "medusa": Task("medusa", demo_drafter="tiny/medusa", demo_target="tiny/target", demo_drafts=4),
    "mtp": Task("mtp", demo_target="tiny/mtp"),
}
COMPARE = "compare"
COMPARED = ("baseline", "ngram", "draft_model", "universal")
DEMO = Path(__file__).parents[2] / "demo"
OTHER_PROMPTS = 8

RULES = ("strict", "standard", "block", "synthetic")
DRAFTING = ("greedy", "probabilistic", "coupled")


def speculative_config(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What the task passes to LLM(speculative_config=...)."""
    task = TASKS[name]
    if task.method is None:
        return None
    most = task.demo_drafts if uses_demo_drafter(name, options) else None
    config = {"method": task.method, "num_speculative_tokens": min(options.num_spec_tokens, most or sys.maxsize)}
    config |= {name: getattr(options, name) for name in task.options}
    if task.needs_draft_model:
        config["model"] = draft_model(name, options)
    for word in options.acceptance or ():
        config["rejection_sample_method" if word in RULES else "draft_sample_method"] = word
    if options.synthetic_rates:
        config["synthetic_acceptance_rates"] = options.synthetic_rates
    return config


def draft_model(name: str, options: argparse.Namespace) -> str | None:
    """The one that was given, else the demo model's, if that is the target and the task needs one."""
    return str(DEMO / TASKS[name].demo_drafter) if uses_demo_drafter(name, options) else options.draft_model


def uses_demo_drafter(name: str, options: argparse.Namespace) -> bool:
    return not (options.draft_model or options.model) and TASKS[name].needs_draft_model


def demo_targets(options: argparse.Namespace) -> set[str | None]:
    """Those of the tasks that draft; None is the demo model."""
    drafting = [TASKS[name] for name in options.tasks if TASKS[name].method is not None]
    return {task.demo_target for task in drafting} or {None}


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


def tasks_of(options: argparse.Namespace) -> list[str]:
    """Each task once; where there are several the baseline is one of them, and the first."""
    asked = [name for word in options.task for name in (compared(options) if word == COMPARE else [word])]
    return list(dict.fromkeys(asked if len(set(asked)) == 1 else ["baseline", *asked]))


def compared(options: argparse.Namespace) -> list[str]:
    return [name for name in COMPARED if draft_model(name, options) or not TASKS[name].needs_draft_model]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--task",
        nargs="+",
        default=["baseline"],
        choices=[*TASKS, COMPARE],
        metavar="TASK",
        help=f"how to draft: {', '.join(TASKS)}; several are compared, {COMPARE} stands for {', '.join(COMPARED)}",
    )
    add("--model", help="Hugging Face id or folder (default: the demo model)")
    add("--draft_model", help="Hugging Face id or folder (default: the one in demo/ for the demo model)")
    add("--osl", type=positive, default=512, help="tokens to generate per prompt, past any end token")
    add("--batch_size", type=positive, default=8, help="requests at a time")
    add("--num_prompts", type=positive, metavar="N", help="how many of the fixed prompts (default: as --batch_size)")
    add("--prompts", type=Path, metavar="FOLDER", help="prompt with every *.txt there (default: eight fixed prompts)")
    add("--num_spec_tokens", type=positive, default=5, help="k, the most tokens drafted per step")
    add("--prompt_lookup_min", type=positive, default=2, help="ngram: the shortest match that counts")
    add("--prompt_lookup_max", type=positive, default=5, help="ngram: the longest match that is looked for")
    add(
        "--acceptance",
        nargs="+",
        choices=[*RULES, *DRAFTING],
        metavar="HOW",
        help=f"a rule ({', '.join(RULES)}), a drafting mode ({', '.join(DRAFTING)}) or one of each",
    )
    add("--synthetic_rates", type=float, nargs="+", metavar="RATE", help="how often the first 1, 2, ... k are accepted")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="prompt i samples with seed + i")
    add("--dtype", help="default: float32 on the CPU and emulated cards, else the model's own")
    add("--enforce_eager", action="store_true")
    add("--num_warmups", type=int, default=1, help="short runs before the measured one")
    add("--run_base", action="store_true", help="run the baseline as well and compare the tokens")
    add("--json", type=Path, metavar="FILE", help="write the report there as well")
    add(
        "--do_profile",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FOLDER",
        help="write torch.profiler's trace of the measured run to FOLDER (default: beside --json, else here)",
    )
    add("--assert_accept_rate", type=float, metavar="RATE", help="fail when fewer of the drafts are accepted")
    add("--accuracy_rate", type=float, metavar="RATE", help="fail when fewer of GSM8K's answers are right (lm-eval)")
    add("--limit", type=positive, metavar="N", help="ask the first N questions of GSM8K only")
    options = parser.parse_args()
    options.tasks = tasks_of(options)
    if contradiction := contradiction_in(options):
        parser.error(contradiction)
    return options


def contradiction_in(options: argparse.Namespace) -> str | None:
    return contradiction_in_tasks(options) or contradiction_in_acceptance(options)


def contradiction_in_tasks(options: argparse.Namespace) -> str | None:
    names = " and ".join(options.tasks)
    drafting = [name for name in options.tasks if TASKS[name].needs_draft_model]
    if options.draft_model and not drafting:
        return f"task {names} needs no draft model; leave out --draft_model"
    if lacking := [name for name in drafting if not draft_model(name, options)]:
        return f"task {lacking[0]} needs --draft_model"
    if all(TASKS[name].method is None for name in options.tasks):
        if options.acceptance or options.assert_accept_rate is not None:
            return f"task {names} drafts nothing; leave out --acceptance and --assert_accept_rate"
    if not options.model and len(demo_targets(options)) > 1:
        return f"the demo has no target for {names} together; run one at a time, or give --model"
    if options.prompts and options.num_prompts:
        return "--num_prompts is for the fixed prompts; leave it out with --prompts"
    if len(options.tasks) > 1 and options.accuracy_rate is not None:
        return "--accuracy_rate is for one task at a time"
    if options.limit and options.accuracy_rate is None:
        return "--limit is for --accuracy_rate"
    return None


def contradiction_in_acceptance(options: argparse.Namespace) -> str | None:
    words = options.acceptance or []
    if len([word for word in words if word in RULES]) > 1 or len([word for word in words if word in DRAFTING]) > 1:
        return "--acceptance takes one rule and one drafting mode at most"
    if ("synthetic" in words) != bool(options.synthetic_rates):
        return "--acceptance synthetic and --synthetic_rates need each other"
    if options.synthetic_rates and len(options.synthetic_rates) != options.num_spec_tokens:
        return f"--synthetic_rates needs one rate for each of the {options.num_spec_tokens} drafts"
    return None


class Missed(Exception):
    """The task ran, but not as well as was asked."""


def run_tasks(options: argparse.Namespace) -> None:
    device = describe_device()
    print(f"device {device['device']}, mode {device['mode']}", flush=True)
    check_what_is_there(options)
    if options.do_profile is not None:
        stay_in_process()
    setup = Setup(
        model=target_model(options),
        other_prompts=other_prompts(options),
        prompts=repetitive_prompts(options.prompts) if options.prompts else fixed_prompts(options),
        dtype=options.dtype or ("float32" if computes_on_the_host(device["device"]) else "auto"),
        **{name: getattr(options, name) for name in Setup.OPTIONS},
    )
    if len(options.tasks) == 1:
        run_one(options.tasks[0], setup, device, options)
    else:
        run_several(setup, device, options)


def computes_on_the_host(device: str) -> bool:
    return device == "cpu" or device.endswith("-emulated")


def run_one(name: str, setup: Setup, device: dict[str, str], options: argparse.Namespace) -> None:
    config = speculative_config(name, options)
    run = measure(name, config, setup, trace=trace_file(name, options))
    report = run.report | device
    if options.run_base:
        run.close()  # two engines at once would compete for the device
        base = measure("baseline", None, setup)
        report["matches_baseline"] = compare(base, run, options.temperature)
        report["baseline"] = base.report | device
        show(report["baseline"])
        base.close()
    show(report)
    if options.accuracy_rate is not None:
        run.close()
        gc.collect()
        report["accuracy"] = gsm8k_accuracy(setup, config, options.limit)
        print(f"GSM8K accuracy       {report['accuracy']:.3f}", flush=True)
    write_json(report, options)
    check_what_was_asked(report, options)


def run_several(setup: Setup, device: dict[str, str], options: argparse.Namespace) -> None:
    """One after the other, since two engines at once would compete for the device."""
    if left_out := [name for name in COMPARED if COMPARE in options.task and name not in options.tasks]:
        print(f"left out, for want of --draft_model: {', '.join(left_out)}", flush=True)
    runs, failures = measure_drafting(setup, options)
    # The baseline comes last: its engine is asked about ties between candidates.
    base = measure("baseline", None, setup, trace=trace_file("baseline", options))
    for run in runs:
        run.report["matches_baseline"] = compare(base, run, options.temperature)
    base.close()
    reports = {run.report["task"]: run.report | device for run in (base, *runs)}
    show_table(reports)
    write_json(reports, options)
    if failures:
        raise Missed("; ".join(failures))
    for run in runs:
        check_what_was_asked(run.report, options)


def measure_drafting(setup: Setup, options: argparse.Namespace) -> tuple[list[Run], list[str]]:
    """A task that fails is reported in the end; the others have their line in the table all the same."""
    runs, failures = [], []
    for name in options.tasks:
        if TASKS[name].method is None:
            continue
        try:
            runs.append(measure(name, speculative_config(name, options), setup, trace=trace_file(name, options)))
            runs[-1].close()
        except Exception as error:
            failures.append(f"{name}: {in_one_line(error)}")
            print(f"[{name}] failed: {in_one_line(error)}", flush=True)
    return runs, failures


def write_json(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def check_what_is_there(options: argparse.Namespace) -> None:
    """Before a model is loaded."""
    for model in (options.model, *(draft_model(name, options) for name in options.tasks)):
        if model and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            raise ValueError(f"there is no model folder {model}; give a folder or a Hugging Face id")
    if options.accuracy_rate is not None and importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--accuracy_rate needs lm-eval: pip install lm-eval, or leave it out")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)


def fixed_prompts(options: argparse.Namespace) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(options.num_prompts or options.batch_size)]


def trace_file(name: str, options: argparse.Namespace) -> Path | None:
    if options.do_profile is None:
        return None
    beside = options.json.parent if options.json else Path()
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


def in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main() -> int:
    options = parse_options()
    try:
        run_tasks(options)
    except Exception as error:
        print(f"error: task {' '.join(options.task)} failed: {in_one_line(error)}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
