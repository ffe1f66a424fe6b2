"""Generate with one way of drafting and report what it gained; the script that users run.

PT_HPU_LAZY_MODE=1 python tests/full_tests/spec_decode.py --task ngram --osl 512

Exit status: 0 when the task ran and met what was asked of it, 1 when it failed (the last line says why), 2 for options
that make no sense. --accuracy_rate needs lm-eval and its data from outside and has not been tried with them.
"""

import argparse
import gc
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The modules beside this one: a script's own folder comes first in the search path.
from repetitive import repetitive_prompts
from spec_accuracy import gsm8k_accuracy
from spec_measure import Setup, compare, measure, stay_in_process
from spec_report import show

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
    needs_draft_model: bool = False


TASKS = {
    "baseline": Task(None),
    "ngram": Task("ngram", ("prompt_lookup_min", "prompt_lookup_max")),
    "suffix": Task("suffix"),
    "draft_model": Task("draft_model", needs_draft_model=True),
    "universal": Task("universal_draft", needs_draft_model=True),
}

RULES = ("strict", "standard", "block", "synthetic")
DRAFTING = ("greedy", "probabilistic", "coupled")


def speculative_config(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What the task passes to LLM(speculative_config=...)."""
    task = TASKS[name]
    if task.method is None:
        return None
    config = {"method": task.method, "num_speculative_tokens": options.num_spec_tokens}
    config |= {name: getattr(options, name) for name in task.options}
    if task.needs_draft_model:
        config["model"] = options.draft_model
    for word in options.acceptance or ():
        config["rejection_sample_method" if word in RULES else "draft_sample_method"] = word
    if options.synthetic_rates:
        config["synthetic_acceptance_rates"] = options.synthetic_rates
    return config


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", default="baseline", choices=list(TASKS), help="how to draft")
    add("--model", help="Hugging Face id or folder (default: the demo model)")
    add("--draft_model", help="Hugging Face id or folder, for tasks that need one")
    add("--osl", type=positive, default=512, help="tokens to generate per prompt, past any end token")
    add("--batch_size", type=positive, default=8, help="requests at a time; without --prompts also how many there are")
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
    add("--dtype", help="default: float32 on the CPU, else the model's own")
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
    if contradiction := contradiction_in(options):
        parser.error(contradiction)
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def contradiction_in(options: argparse.Namespace) -> str | None:
    task, words = TASKS[options.task], options.acceptance or []
    if options.draft_model and not task.needs_draft_model:
        return f"task {options.task} needs no draft model; leave out --draft_model"
    if task.needs_draft_model and not options.draft_model:
        return f"task {options.task} needs --draft_model"
    if len([word for word in words if word in RULES]) > 1 or len([word for word in words if word in DRAFTING]) > 1:
        return "--acceptance takes one rule and one drafting mode at most"
    if ("synthetic" in words) != bool(options.synthetic_rates):
        return "--acceptance synthetic and --synthetic_rates need each other"
    if options.synthetic_rates and len(options.synthetic_rates) != options.num_spec_tokens:
        return f"--synthetic_rates needs one rate for each of the {options.num_spec_tokens} drafts"
    if task.method is None and (words or options.assert_accept_rate is not None):
        return f"task {options.task} drafts nothing; leave out --acceptance and --assert_accept_rate"
    if options.limit and options.accuracy_rate is None:
        return "--limit is for --accuracy_rate"
    return None


class Missed(Exception):
    """The task ran, but not as well as was asked."""


def run_task(options: argparse.Namespace) -> None:
    device = describe_device()
    print(f"device {device['device']}, mode {device['mode']}", flush=True)
    check_what_is_there(options)
    if options.do_profile is not None:
        stay_in_process()
    setup = Setup(
        model=options.model or str(demo_model_path()),
        prompts=repetitive_prompts(options.prompts) if options.prompts else fixed_prompts(options.batch_size),
        dtype=options.dtype or ("float32" if device["device"] == "cpu" else "auto"),
        **{name: getattr(options, name) for name in Setup.OPTIONS},
    )
    config = speculative_config(options.task, options)
    run = measure(options.task, config, setup, trace=trace_file(options))
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
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    check_what_was_asked(report, options)


def check_what_is_there(options: argparse.Namespace) -> None:
    """Before a model is loaded."""
    if options.model and options.model.startswith(("/", ".", "~")) and not Path(options.model).is_dir():
        raise ValueError(f"there is no model folder {options.model}; give a folder or a Hugging Face id")
    if options.accuracy_rate is not None and importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--accuracy_rate needs lm-eval: pip install lm-eval, or leave it out")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)


def fixed_prompts(count: int) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)]


def trace_file(options: argparse.Namespace) -> Path | None:
    if options.do_profile is None:
        return None
    beside = options.json.parent if options.json else Path()
    folder = beside if options.do_profile == Path() else options.do_profile
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"trace_{options.task}.json.gz"


def check_what_was_asked(report: dict[str, Any], options: argparse.Namespace) -> None:
    if (asked := options.assert_accept_rate) is not None:
        rate = report["acc_rate"]
        if rate is None:
            raise Missed(f"nothing was drafted, and --assert_accept_rate asks for {asked}")
        if rate < asked:
            raise Missed(f"acc_rate {rate:.3f} is below the {asked} of --assert_accept_rate")
    if (asked := options.accuracy_rate) is not None and report["accuracy"] < asked:
        raise Missed(f"GSM8K accuracy {report['accuracy']:.3f} is below the {asked} of --accuracy_rate")


def main() -> int:
    options = parse_options()
    try:
        run_task(options)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"error: task {options.task} failed: {reason}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
