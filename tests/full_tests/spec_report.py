"""Print a report, or a table of several; a part of spec_decode.py."""

from typing import Any

MOST_TEXTS = 8
TEXT_WIDTH = 100
COLUMNS = ("task", "tokens/s", "ratio", "tokens/step", "acceptance", "same text as baseline")


def show(report: dict[str, Any]) -> None:
    print(f"\n=== {report['task']} (device {report['device']}, mode {report['mode']}) ===")
    print(f"k {report['k']}, batch size {report['batch_size']}")
    print(f"latency              {report['latency_s']:.2f} s")
    print(f"speed                {report['tokens_per_s']:.1f} tokens/s")
    if report["k"]:
        rate = "no drafts" if report["acc_rate"] is None else f"{report['acc_rate']:.3f}"
        print(f"acc_rate             {rate}")
        if report["acc_rate_elsewhere"] is not None:
            print(f"acc_rate elsewhere   {report['acc_rate_elsewhere']:.3f}, on prompts unlike those of its training")
        print(f"acc_counts           {report['acc_counts']}")
        print(f"mean accepted length {report['mean_accepted_length']:.2f}")
        print(f"num_drafts           {report['num_drafts']}")
        print(f"num_draft_tokens     {report['num_draft_tokens']}")
        print(f"num_accepted_tokens  {report['num_accepted_tokens']}")
        print(f"tokens per step      {report['tokens_per_step']:.2f}")
    graphs = report["graphs"]
    print(f"graphs               {graphs['warmup']} in warm-up, {graphs['after_warmup']} after it")
    if report["compiled_after_warmup"] is not None:
        print(f"compiled after it    {report['compiled_after_warmup']}, as the device counts")
    print(f"host syncs per step  {report['host_syncs_per_step']:.2f}")
    if report["matches_baseline"] is not None:
        print("against baseline     " + counted(report["matches_baseline"]))
    for prompt, text in list(zip(report["prompts"], report["texts"], strict=True))[:MOST_TEXTS]:
        print(f"  {prompt!r}\n    -> {text!r}")
    print(flush=True)


def counted(verdicts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in verdicts.items())


# ---- several tasks side by side -------------------------------------------------------------------------


def show_table(reports: dict[str, dict[str, Any]]) -> None:
    """One line per task, the baseline first, and how to read it."""
    base = reports["baseline"]
    k = max(report["k"] for report in reports.values())
    print("\nWhat was said without speculation:")
    for prompt, text in list(zip(base["prompts"], base["texts"], strict=True))[:MOST_TEXTS]:
        print(f"  {shortened(prompt + text)!r}")
    print(f"\n=== side by side (device {base['device']}, mode {base['mode']}) ===")
    print(f"k {k}, {len(base['prompts'])} prompts, {base['batch_size']} at a time\n")
    for line in aligned([COLUMNS, *(row_of(report, base) for report in reports.values())]):
        print(line)
    print("\nratio: tokens/s against no speculation, one run each; a busy machine moves it a lot.")
    print("tokens/step: what a request gains per step of the target, whatever the machine.")
    if base["device"] == "cpu":
        print("On a CPU drafting gains most with one request at a time; with eight it often costs more than it saves.")
    print(flush=True)


def row_of(report: dict[str, Any], base: dict[str, Any]) -> tuple[str, ...]:
    rate, verdicts = report["acc_rate"], report["matches_baseline"]
    return (
        report["task"],
        f"{report['tokens_per_s']:.1f}",
        f"{report['tokens_per_s'] / base['tokens_per_s']:.2f}",
        f"{report['tokens_per_step']:.2f}",
        "-" if rate is None else f"{rate:.3f}",
        "-" if verdicts is None else counted(verdicts),
    )


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Words to the left, the numbers between them to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip() for row in rows
    ]


def shortened(text: str) -> str:
    return text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 3] + "..."
