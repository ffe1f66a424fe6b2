"""What a comparison prints: one task in full, or a table of several."""

from __future__ import annotations

from typing import Any, TextIO

from vllm_gaudi_spec.tools.compare.tasks import BASELINE
from vllm_gaudi_spec.tools.io.terminal import show_table
from vllm_gaudi_spec.tools.report import record

MOST_TEXTS = 8
TEXT_WIDTH = 100
COLUMNS = ("task", "tokens/s", "ratio", "middle half", "tokens/step", "acceptance", "same text as baseline")


def show(report: dict[str, Any], device: dict[str, str], file: TextIO) -> None:
    def say(text: str) -> None:
        print(text, file=file, flush=True)

    say(f"\n=== {report['task']} (device {device['device']}, mode {device['mode']}) ===")
    say(f"k {report['k']}, batch size {report['batch_size']}")
    say(f"latency              {report['latency_s']:.2f} s")
    say(f"speed                {report['tokens_per_s']:.1f} tokens/s")
    if report["k"]:
        rate = "no drafts" if report["acc_rate"] is None else f"{report['acc_rate']:.3f}"
        say(f"acc_rate             {rate}")
        if report["acc_rate_elsewhere"] is not None:
            say(f"acc_rate elsewhere   {report['acc_rate_elsewhere']:.3f}, on prompts unlike those of its training")
        say(f"acc_counts           {report['acc_counts']}")
        say(f"mean accepted length {report['mean_accepted_length']:.2f}")
        say(f"num_drafts           {report['num_drafts']}")
        say(f"num_draft_tokens     {report['num_draft_tokens']}")
        say(f"num_accepted_tokens  {report['num_accepted_tokens']}")
        say(f"tokens per step      {report['tokens_per_step']:.2f}")
    graphs = report["graphs"]
    say(f"graphs               {graphs['warmup']} in warm-up, {graphs['after_warmup']} after it")
    if report["compiled_after_warmup"] is not None:
        say(f"compiled after it    {report['compiled_after_warmup']}, as the device counts")
    say(f"host syncs per step  {report['host_syncs_per_step']:.2f}")
    if report["matches_baseline"] is not None:
        say("against baseline     " + counted(report["matches_baseline"]))
    for prompt, text in prompts_and_texts(report)[:MOST_TEXTS]:
        say(f"  {prompt!r}\n    -> {text!r}")
    say("")


def counted(conclusions: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in conclusions.items())


# ---- several tasks side by side -------------------------------------------------------------------------


def show_several(
    reports: dict[str, dict[str, Any]], device: dict[str, str], measurement: dict[str, Any], file: TextIO
) -> None:
    """One line per task, the baseline first, and how to read it."""

    def say(text: str) -> None:
        print(text, file=file, flush=True)

    base = reports[BASELINE]
    k = max(report["k"] for report in reports.values())
    say("\nWhat was said without speculation:")
    for prompt, text in prompts_and_texts(base)[:MOST_TEXTS]:
        say(f"  {shortened(prompt + text)!r}")
    say(f"\n=== side by side (device {device['device']}, mode {device['mode']}) ===")
    say(f"k {k}, {len(base['answers'])} prompts, {base['batch_size']} at a time\n")
    show_table(COLUMNS, [row_of(report) for report in reports.values()], file)
    say(f"\n{record.how_measured(measurement)}")
    say("ratio: seconds without speculation over the task's, for the same prompt in the same turn: the median of all,")
    say("and their middle half, from the lower quartile to the upper; prompts differ, and a busy machine widens it.")
    say("tokens/step: what a request gains per step of the target, whatever the machine.")
    if device["device"] == "cpu":
        say("On a CPU drafting gains most with one request at a time; with eight it often costs more than it saves.")
    say("")


def row_of(report: dict[str, Any]) -> tuple[str, ...]:
    rate, conclusions = report["acc_rate"], report["matches_baseline"]
    return (
        report["task"],
        f"{report['tokens_per_s']:.1f}",
        "1.00" if report["speedup"] is None else f"{report['speedup']['ratio']:.2f}",
        "-" if report["speedup"] is None else "{low:.2f} to {high:.2f}".format(**report["speedup"]),
        f"{report['tokens_per_step']:.2f}",
        "-" if rate is None else f"{rate:.3f}",
        "-" if conclusions is None else counted(conclusions),
    )


def prompts_and_texts(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(answer["prompt"], "".join(answer["pieces"])) for answer in report["answers"]]


def shortened(text: str) -> str:
    return text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 3] + "..."
