"""The printed output of a comparison: one task in full, or a table of several."""

from __future__ import annotations

from typing import Any, TextIO

from vllm_gaudi_spec.tools.compare.tasks import BASELINE
from vllm_gaudi_spec.tools.io.output import show_table
from vllm_gaudi_spec.tools.report import record

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


def show(report: dict[str, Any], device: dict[str, str], file: TextIO) -> None:
    def write(text: str) -> None:
        print(text, file=file, flush=True)

    write(f"\n=== {report['task']} (device {device['device']}, mode {device['mode']}) ===")
    write(f"k {report['k']}, concurrency {report['batch_size']}")
    write(f"latency              {report['latency_s']:.2f} s")
    write(f"throughput           {report['tokens_per_s']:.1f} tokens/s")
    if report["k"]:
        rate = "no drafts" if report["acc_rate"] is None else f"{report['acc_rate']:.3f}"
        write(f"acceptance rate      {rate}")
        if report["acc_rate_elsewhere"] is not None:
            write(f"on other prompts     {report['acc_rate_elsewhere']:.3f}, unlike those of the drafter's training")
        write(f"accepted by position {report['acc_counts']}")
        write(f"acceptance length    {report['mean_accepted_length']:.2f} on average, over steps with drafts")
        write(f"over all steps       {report['tokens_per_step']:.2f}, those without drafts too")
        write(f"num_drafts           {report['num_drafts']}")
        write(f"num_draft_tokens     {report['num_draft_tokens']}")
        write(f"num_accepted_tokens  {report['num_accepted_tokens']}")
    graphs = report["graphs"]
    write(f"graphs               {graphs['warmup']} in warm-up, {graphs['after_warmup']} after it")
    if report["compiled_after_warmup"] is not None:
        write(f"compiled after it    {report['compiled_after_warmup']}, by the device's counter")
    write(f"device-to-host syncs {report['host_syncs_per_step']:.2f} per step")
    if report["matches_baseline"] is not None:
        write("against baseline     " + counted(report["matches_baseline"]))
    for prompt, text in prompts_and_texts(report)[:MAX_TEXTS]:
        write(f"  {prompt!r}\n    -> {text!r}")
    write("")


def counted(conclusions: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in conclusions.items())


# ---- several tasks side by side -------------------------------------------------------------------------


def show_several(
    reports: dict[str, dict[str, Any]], device: dict[str, str], measurement: dict[str, Any], file: TextIO
) -> None:
    """Print one line per task, the baseline first, and how to read it."""

    def write(text: str) -> None:
        print(text, file=file, flush=True)

    base = reports[BASELINE]
    k = max(report["k"] for report in reports.values())
    write("\nGenerated text without speculation:")
    for prompt, text in prompts_and_texts(base)[:MAX_TEXTS]:
        write(f"  {shortened(prompt + text)!r}")
    write(f"\n=== side by side (device {device['device']}, mode {device['mode']}) ===")
    write(f"k {k}, {len(base['answers'])} prompts, concurrency {base['batch_size']}\n")
    show_table(COLUMNS, [row_of(report) for report in reports.values()], file)
    write(f"\n{record.how_measured(measurement)}")
    write("speedup: seconds without speculation over the task's, for the same prompt in the same turn: the median;")
    write("quartiles: the lower and the upper one; prompts differ, and a busy machine widens the range.")
    write("acceptance length: mean tokens per request and step of the target, over steps with drafts;")
    write("all steps: the same over those without drafts too. Neither depends on the machine.")
    if device["device"] == "cpu":
        write("On a CPU the speedup is largest at concurrency 1; at 8, drafting often costs more than it saves.")
    write("")


def row_of(report: dict[str, Any]) -> tuple[str, ...]:
    rate, conclusions = report["acc_rate"], report["matches_baseline"]
    return (
        report["task"],
        f"{report['tokens_per_s']:.1f}",
        "1.00" if report["speedup"] is None else f"{report['speedup']['ratio']:.2f}",
        "-" if report["speedup"] is None else "{low:.2f} to {high:.2f}".format(**report["speedup"]),
        f"{record.mean_acceptance_length(report):.2f}",
        f"{report['tokens_per_step']:.2f}",
        "-" if rate is None else f"{rate:.3f}",
        "-" if conclusions is None else counted(conclusions),
    )


def prompts_and_texts(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(answer["prompt"], "".join(answer["pieces"])) for answer in report["answers"]]


def shortened(text: str) -> str:
    return text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 3] + "..."
