"""Write the generated parts of the documentation: reference tables, and tables and plots of measurements.

python docs/generate.py [--check]

A part stands between `<!-- generated: NAME -->` and `<!-- end of generated text -->` in a page. With --check, nothing
is written, and the exit status is 1 if a page or plot is not what this program would write.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from html import escape
from pathlib import Path
from statistics import median
from textwrap import wrap
from types import NoneType
from typing import Any, get_args, get_origin

from vllm.config import SpeculativeConfig

from vllm_gaudi_spec.config import Options
from vllm_gaudi_spec.devices.ascend import compared as ascend
from vllm_gaudi_spec.devices.hpu import compared as hpu
from vllm_gaudi_spec.environment import VARIABLES
from vllm_gaudi_spec.metrics import SERIES
from vllm_gaudi_spec.recurrent.table import SERVED
from vllm_gaudi_spec.tools.cli import COMMANDS, make_parser
from vllm_gaudi_spec.tools.report import record
from vllm_gaudi_spec.upstream import widen_speculative_options

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated text -->)", re.S)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


# --- reference ---


def options() -> str:
    """Tabulate `Options` with the docstrings of its fields."""
    (body,) = ast.parse(inspect.getsource(Options)).body
    assert isinstance(body, ast.ClassDef)
    meanings = {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    kinds = {"tuple": "list of integers", "str": "string", "int": "integer"}
    rows = []
    for field in fields(Options):
        kind = kinds[re.split(r"\W", str(field.type))[0]]
        default = "" if field.default in (None, MISSING) else f" Default: {json.dumps(field.default)}."
        rows.append([f"`{field.name}`", kind, " ".join(meanings[field.name].split()) + default])
    return table(["option", "type", "meaning"], rows)


SPECULATIVE = {
    "method": "A [method](methods.md), including **`universal_draft`**. Default: determined by `model`.",
    "model": "The drafter's folder or Hugging Face id, or a class for `custom_class`.",
    "num_speculative_tokens": "k, from 1 to 16. Default: the checkpoint's, or 15 with `suffix`; required otherwise.",
    "draft_sample_method": "[How drafts are made](../explanation/acceptance.md#how-drafts-are-made): {values}.",
    "rejection_sample_method": (
        "[How drafts are accepted](../explanation/acceptance.md#how-drafts-are-accepted): {values}."
    ),
    "num_speculative_tokens_per_batch_size": "[k by batch size](methods.md#how-much-is-drafted).",
    "enable_adaptive_verification": "[Choose k for each step](methods.md#how-much-is-drafted).",
    "max_model_len": "The drafter's longest context. Default: the checkpoint's.",
    "draft_tensor_parallel_size": (
        "The target's size, or 1: [where the drafter runs](../how_to/distributed.md#choose-where-the-drafter-runs). "
        "Default: the target's."
    ),
    "quantization": "The drafter's quantization method. Default: the checkpoint's.",
    "revision": "The drafter's revision on the Hugging Face Hub.",
    "draft_load_config": "How the drafter is loaded. Default: like the target.",
    "parallel_drafting": "[Draft all k tokens in one forward pass](methods.md#parallel-drafting).",
    "draft_lm_head_quantization": "`fp8`: draft from [a copy of the output matrix](methods.md#output-matrix-in-fp8).",
    "prompt_lookup_min": "The shortest n-gram. Default: `prompt_lookup_max`, or 5.",
    "prompt_lookup_max": "The longest n-gram. Default: `prompt_lookup_min`, or 5.",
    "suffix_decoding_max_tree_depth": "The maximum length of a match and its drafts together, in tokens.",
    "suffix_decoding_max_cached_requests": "The number of past answers in the suffix tree.",
    "suffix_decoding_max_spec_factor": "The maximum number of drafts per token of the match.",
    "suffix_decoding_min_token_prob": "The minimum probability of a draft token.",
    "disable_eagle_block_drop": "[Keep a head's last cached block](methods.md#eagle-and-eagle3).",
    "use_heterogeneous_vocab": "vLLM's spelling of the method `universal_draft`.",
    "synthetic_acceptance_rates": "For the rule `synthetic`: the rate at which drafts are accepted, by position.",
    "synthetic_acceptance_length": "For the rule `synthetic`: the mean acceptance length, instead of rates.",
}
"""The options of vLLM's `SpeculativeConfig` that are used here. Others are refused, or ignored with a warning."""


def speculative() -> str:
    """Tabulate the options of --speculative-config, with types and defaults as vLLM's class has them."""
    known = SpeculativeConfig.__dataclass_fields__
    theirs = {name: set(get_args(known[name].type)) for name in SPECULATIVE if name in known}
    widen_speculative_options()
    rows = []
    for name, meaning in SPECULATIVE.items():
        field = known[name]
        values = [f"`{value}`" if value in theirs.get(name, ()) else f"**`{value}`**" for value in get_args(field.type)]
        default = getattr(field.default, "default", field.default)  # of pydantic's Field
        if default is not None:
            meaning += f" Default: {json.dumps(default)}."
        rows.append([f"`{name}`", describe_type(field.type), meaning.format(values=", ".join(values))])
    return table(["option", "type", "meaning"], rows)


def describe_type(kind: Any) -> str:
    """Return the JSON type of a field of vLLM's."""
    (kind, *_) = [part for part in get_args(kind) if part is not NoneType] or [kind]
    name = str(getattr(get_origin(kind) or kind, "__name__", kind))
    return {"bool": "boolean", "int": "integer", "float": "number", "list": "list", "LoadConfig": "object"}.get(
        name, "string"
    )


def environment() -> str:
    rows = [[f"`{variable.name}`", variable.default, variable.meaning] for variable in VARIABLES]
    return table(["variable", "default", "meaning"], rows)


def metrics() -> str:
    rows = []
    for name, series in SERIES.items():
        shown = name if series.is_gauge else f"{name}_total"
        rows.append([f"`{shown}`", f"`{series.label}`" if series.label else "", series.help])
    return table(["series", "label", "meaning"], rows)


def command(name: str) -> str:
    """Tabulate the options of a command of `gaudi-spec`."""
    (commands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    rows = []
    for action in commands.choices[name]._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        names = ", ".join(f"`{option}{value}`" for option in action.option_strings) or f"`{value.strip()}`"
        meaning = (action.help or "") % {**vars(action), "prog": name}
        rows.append([names, meaning.replace("|", "\\|")])
    return table(["option", "meaning"], rows)


_GAUDI, _NPU = {"emulated Gaudi, lazy": "lazy", "emulated Gaudi, compiled": "compiled"}, "emulated NPU"


def recurrent() -> str:
    cards = {title: hpu.RECURRENT[mode] for title, mode in _GAUDI.items()} | {_NPU: ascend.RECURRENT}
    rows = [
        [f"`{name}`", *("yes" if name in served else "no" for served in cards.values())]
        for name in sorted(SERVED, key=str.lower)
    ]
    return table(["class", *cards], rows)


def media() -> str:
    cards = {title: hpu.MEDIA[mode] for title, mode in _GAUDI.items()}
    names = sorted({name for served in cards.values() for name in served}, key=str.lower)
    rows = [[f"`{name}`", *("yes" if name in served else "no" for served in cards.values())] for name in names]
    return table(["class", *cards], rows)


# --- measurements ---

Row = dict[str, Any]


VENDOR_ROWS = {
    "graphs made in warm-up": "graphs captured in warm-up",
    "programs compiled in warm-up": "compilations in warm-up",
    "compiles after warm-up": "compilations after warm-up",
    "copies to the host a step": "copies to the host per step",
    "graph replays a step": "graph replays per step",
    "launches a step": "launches per step",
    "uploads a step": "copies to the card per step",
    "KV read, MB": "KV read, MB",
    "bytes moved, MB": "bytes moved, MB",
    "tokens that are neither transformers' nor tied with them": "tokens that differ from `transformers`, except ties",
}
"""Maps the names of counts in the result file to their names in the page."""


def rows_of(result: str, number: int = 0) -> list[Row]:
    """Return a table of a result file as one dictionary per row."""
    found = json.loads((RESULTS / f"{result}.json").read_text())["tables"][number]
    # If two columns have the same title, the first one counts.
    return [dict(zip(reversed(found["columns"]), reversed(row), strict=True)) for row in found["rows"]]


def pick(rows: Iterable[Row], columns: dict[str, str]) -> str:
    """Tabulate columns of a result by their titles in the page."""
    return table(
        list(columns.values()), (["" if row[name] is None else str(row[name]) for name in columns] for row in rows)
    )


def number(text: Any) -> float:
    """Return the first number in a cell."""
    found = re.search(r"-?\d+(\.\d+)?", str(text))
    assert found, text
    return float(found[0])


def interval(text: Any) -> tuple[float, float] | None:
    """Return the interval in a cell such as `1.05 [1.01, 1.09]`."""
    found = re.search(r"\[([\d.]+), ([\d.]+)\]", str(text))
    return None if found is None else (float(found[1]), float(found[2]))


Bar = tuple[str, float, tuple[float, float] | None]


def plot(title: str, *panels: tuple[str, Sequence[Bar]]) -> str:
    """Draw panels of bars as SVG, with intervals and a line at 1. Text stays legible on a phone, 480 pixels wide."""
    everything = [bar for _, bars in panels for bar in bars]
    left = 20 + int(6.3 * max(len(label) for label, _, _ in everything))
    scale = (420 - left) / max(max(value, *(spread or (value,))) for _, value, spread in everything)
    lines = []
    y = 8

    def write(text: str, weight: str) -> None:
        nonlocal y
        for line in wrap(text, 62 if weight == "bold" else 70):
            y += 18
            lines.append(f'<text x="12" y="{y}" font-weight="{weight}">{escape(line)}</text>')

    write(title, "bold")
    for heading, bars in panels:
        y += 6
        write(heading, "normal")
        y += 8
        line = f"M{left + scale:.1f} {y - 2}V{y + 22 * len(bars) + 2}"
        for label, value, spread in bars:
            lines.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
            color = "#90a4ae" if value >= 1 else "#e57373"
            lines.append(f'<rect x="{left}" y="{y + 3}" width="{value * scale:.1f}" height="16" fill="{color}"/>')
            end = value
            if spread is not None:
                low, high = spread
                end = max(value, high)
                lines.append(f'<path d="M{left + low * scale:.1f} {y + 11}H{left + high * scale:.1f}" stroke="#000"/>')
            x = left + end * scale + 6
            if x < left + scale < x + 26:  # beside the line, not on it
                x = left + scale + 6
            lines.append(f'<text x="{x:.1f}" y="{y + 15}">{value:.2f}</text>')
            y += 22
        lines.append(f'<path d="{line}" stroke="#000" stroke-dasharray="4 3"/>')
    start = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="480" viewBox="0 0 480 {y + 12}" font-family="sans-serif">',
        "<style>text { font-size: 12px }</style>",
        f"<title>{escape(title)}</title>",
        f'<rect width="480" height="{y + 12}" fill="#fff"/>',
    ]
    return "\n".join([*start, *lines, "</svg>"]) + "\n"


def bars(rows: Iterable[Row], label: Callable[[Row], str], value: str) -> list[Bar]:
    return [(label(row), number(row[value]), interval(row[value])) for row in rows]


def method_and_batch(row: Row) -> str:
    return f"{row['method'].rstrip(' †').replace('heterogeneous', 'universal_draft')}, batch {row['batch']}"


CELL_TIMES = {"step": "of a step", "batch": "of the batch", "first": "to first tokens"}


def ratios_cpu(drafts: bool, what: str, suffix: str) -> list[float]:
    """Return vLLM's time over ours in each random cell on a CPU that drafts, or that does not."""
    cells = rows_of("upstream_random_cpu")
    return [cell[f"time {what} / upstream{suffix}"][0] for cell in cells if (cell["k"] > 0) == drafts]


def cells_cpu() -> list[Row]:
    """Summarize the random cells on a CPU by whether they draft."""
    found = []
    for title, drafts in (("no speculation", False), ("with drafts", True)):
        for upstream, suffix in (("as started", ""), ("all cores", ", all cores")):
            ratios = {name: ratios_cpu(drafts, what, suffix) for name, what in CELL_TIMES.items()}
            middle = {name: f"{median(values):.2f}" for name, values in ratios.items()}
            found.append({"requests": f"{len(ratios['step'])} cells, {title}", "upstream": upstream, **middle})
    return found


def same_cores(drafts: bool) -> list[Bar]:
    """Return the medians of the random cells beside vLLM with the same cores, with the range of cells."""
    titles = {"step": "decode step", "batch": "whole batch", "first": "first tokens"}
    ratios = {titles[name]: ratios_cpu(drafts, what, ", all cores") for name, what in CELL_TIMES.items()}
    return [(title, median(values), (min(values), max(values))) for title, values in ratios.items()]


def cells_gpu() -> list[Row]:
    """Summarize the random cells on a GPU by method."""
    found = []
    titles = ("no speculation", "draft model", "draft model, older runner", "EAGLE", "n-grams")
    for place, title in enumerate(titles):
        cells = rows_of("upstream_random_h200", place)
        row: Row = {"method": f"{title}, {len(cells)} cells"}
        for name, what in CELL_TIMES.items():
            ratios = [cell[f"time {what} / upstream"][0] for cell in cells]
            row[name] = f"{median(ratios):.2f} ({min(ratios):.2f})"
        found.append(row)
    return found


def prompts_gpu() -> list[Row]:
    """Summarize first tokens by number of requests and length of prompts, without drafts."""
    found = []
    for low, high in ((100, 500), (1000, 4000), (5000, 8000)):
        row: Row = {"prompts": f"{low:,} to {high:,} tokens"}
        for requests in (1, 8, 32):
            ratios = [
                cell["time to first tokens / upstream"][0]
                for cell in rows_of("upstream_prompts_h200")
                if low <= cell["prompt tokens"] < high and cell["requests"] == requests
            ]
            row[str(requests)] = f"{median(ratios):.2f}"
        found.append(row)
    return found


def acceptance() -> list[Row]:
    """Return the mean acceptance length by drafter, drafting mode and rule."""
    rows = rows_of("speculation_acceptance_cpu")
    greedy = {row["drafter"]: row["T = 0"] for row in rows if row["drafting"] == "greedy"}
    for row in rows:
        if row["T = 0"] == "as greedy":  # at temperature 0, all modes draft the same tokens
            row["T = 0"] = greedy[row["drafter"]]
    return rows


def without_intervals(rows: Iterable[Row]) -> list[Row]:
    return [{name: re.sub(r" \[.*\]", "", str(cell)) for name, cell in row.items()} for row in rows]


def matching() -> list[Row]:
    """Return the mean acceptance length at k = 3 and temperature 0 of each way to match vocabularies."""
    names = {
        "strings, as upstream": "by strings, as in vLLM",
        "bytes": "`map`",
        "bytes, re-tokenized": "`retokenize`",
        "SLEM": "`slem`",
        "transformers": "transformers' assisted generation",
    }
    return [
        {
            "pair": row["target × drafter"],
            "matching": names[row["method"]],
            "length": row["mean acceptance length [95 %]"],
        }
        for row in rows_of("speculation_acceptance_cpu", 1)
        if row["k"] == "3" and row["T"] == "0"
    ]


def rounds() -> list[Row]:
    found = json.loads((RESULTS / "rounds_h200.json").read_text())["rows"]
    return [
        {
            "batch": row["batch"],
            **{name: f"{ms:.2f}" for name, ms in row["round_ms"].items()},
            "ratio": f"{row['round_ms']['dflash'] / row['round_ms']['eagle']:.2f}",
        }
        for row in found
    ]


def rules() -> list[Row]:
    """Return the acceptance rules that upstream has a sampler for."""
    return [row for row in rows_of("rejection_h200") if row["rule"] != "all" and row["geometric mean"] != "-"]


def verify() -> list[Row]:
    shown = {("1", "4096"), ("8", "512"), ("8", "4096"), ("8", "16384"), ("32", "512"), ("32", "4096"), ("32", "16384")}
    return [r for r in rows_of("verify_h200") if r["k"] == "4" and (r["batch"], r["context"]) in shown]


def drafting(row: Row) -> str:
    model = row["drafter"].removeprefix("draft model, ")
    return f"{model}: {row['drafting']}, {row['rule']}" if model != row["drafter"] else model


def demo() -> list[Bar]:
    """Return the demo's speedups with the range of its runs."""
    found: list[Bar] = []
    for row in rows_of("demo_cpu"):
        low, high = map(float, row["of five runs"].split(" to "))
        found.append((row["task"], float(row["speedup"]), (low, high)))
    return found


PAIRS = (
    ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"),
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    ("Qwen/Qwen3-32B", "Qwen/Qwen3-1.7B"),
    ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
)
"""Published targets of 1B parameters or more with draft models of their vocabulary."""


def pairs() -> list[Row]:
    """Return the figures of published pairs, from the records of `gaudi-spec demo` in the results."""
    found = []
    for target, drafter in PAIRS:
        row: Row = {"target": f"`{target}`", "drafter": f"`{drafter}`", "length": "not measured", "speedup": ""}
        path = RESULTS / f"pair_{target.split('/')[1]}_{drafter.split('/')[1]}.json"
        if path.is_file():
            task = record.read(path)["tasks"]["draft_model"]
            link = f"../../{path.relative_to(DOCS.parent)}"
            row |= {"length": f"{record.compute_acceptance_length(task):.2f}"}
            row |= {"speedup": "[{ratio:.2f} ({low:.2f} to {high:.2f})]({link})".format(**task["speedup"], link=link)}
        found.append(row)
    return found


PLOTS: dict[str, Callable[[], str]] = {
    "demo": lambda: plot(
        "Speed on two CPU cores, in float32",
        ("With drafts; no speculation = 1. The demo at concurrency 1, with the range of five runs", demo()),
        (
            "Without drafts; vLLM's CPU platform with the same cores = 1. Medians and ranges of six random cells",
            same_cores(drafts=False),
        ),
        ("With drafts on both sides; vLLM's CPU platform with the same cores = 1", same_cores(drafts=True)),
    ),
    "cpu_upstream": lambda: plot(
        "Throughput at k = 3",
        ("vLLM's CPU platform = 1", bars(rows_of("upstream_cpu"), method_and_batch, "ratio")),
    ),
    "cpu_speedup": lambda: plot(
        "Speedup at concurrency 1 on texts like the drafters' training",
        (
            "No speculation = 1",
            bars(rows_of("speculation_speed_cpu"), lambda row: f"{row['method']}, k = {row['k']}", "speedup"),
        ),
    ),
    "cpu_acceptance": lambda: plot(
        "Mean acceptance length at temperature 1, k = 3",
        ("No speculation = 1", bars(acceptance(), drafting, "T = 1")),
    ),
    "cpu_matching": lambda: plot(
        "Mean acceptance length at temperature 0, k = 3",
        (
            "No speculation = 1",
            bars(matching(), lambda row: f"{row['pair']}: {re.findall('[a-z ]+', row['matching'])[0]}", "length"),
        ),
    ),
    "gpu_upstream": lambda: plot(
        "Throughput without speculation",
        (
            "vLLM's faster runner = 1",
            bars(rows_of("cuda_h100", 8), lambda row: f"{row['sampling']}, batch {row['B']}", "ratio"),
        ),
    ),
    "gpu_speedup": lambda: plot(
        "Speedup at k = 4",
        ("No speculation = 1", bars(rows_of("real_weights_h100"), method_and_batch, "speedup")),
    ),
    "gpu_verify": lambda: plot(
        "Time of a verify step, k = 4",
        (
            "A plain step = 1",
            bars(verify(), lambda row: f"batch {row['batch']}, context {row['context']}", "verify / plain"),
        ),
    ),
    "gpu_rates": lambda: plot(
        "Speedup at k = 4 by acceptance rate",
        (
            "No speculation = 1",
            bars(rows_of("end_to_end_h100"), lambda row: f"batch {row['batch']}, rate {row['rate']}", "speedup"),
        ),
    ),
    "gpu_rules": lambda: plot(
        "Speed of acceptance rules",
        (
            "vLLM's faster sampler = 1",
            bars(rules(), lambda row: str(row["rule"]), "geometric mean"),
        ),
    ),
}
PARTS: dict[str, Callable[[], str]] = {
    "cpu_cells": lambda: pick(
        cells_cpu(),
        {
            "requests": "cells",
            "upstream": "vLLM's cores",
            "step": "decode step",
            "batch": "whole batch",
            "first": "first tokens",
        },
    ),
    "cpu_demo": lambda: pick(
        rows_of("demo_cpu"),
        {
            "task": "task",
            "speedup": "speedup",
            "of five runs": "range of five runs",
            "mean acceptance length, all steps": "mean acceptance length, all steps",
        },
    ),
    "cpu_acceptance": lambda: pick(
        without_intervals(acceptance()),
        {
            "drafter": "drafter",
            "drafting": "drafts",
            "rule": "rule",
            "same text for a seed": "seeds kept",
            "T = 0": "T = 0",
            "T = 0.7": "T = 0.7",
            "T = 1": "T = 1",
        },
    ),
    "cpu_matching": lambda: pick(
        matching(), {"pair": "target × drafter", "matching": "matching", "length": "mean acceptance length"}
    ),
    "gpu_upstream": lambda: pick(
        rows_of("cuda_h100", 8),
        {
            "B": "batch",
            "sampling": "sampling",
            "tokens/s, ours": "tokens/s, ours",
            "upstream, newer": "vLLM, newer runner",
            "upstream, older": "older runner",
            "ratio": "ratio",
        },
    ),
    "gpu_cells": lambda: pick(
        cells_gpu(), {"method": "cells", "step": "decode step", "batch": "whole batch", "first": "first tokens"}
    ),
    "gpu_prompts": lambda: pick(
        prompts_gpu(), {"prompts": "prompts", "1": "1 request", "8": "8 requests", "32": "32 requests"}
    ),
    "gpu_serving": lambda: pick(
        [
            {**row, "drafts": drafts}
            for place, drafts in enumerate(("none", "EAGLE"))
            for row in rows_of("serving_h200", place)
        ],
        {
            "drafts": "drafts",
            "requests/s": "requests/s",
            "server": "server",
            "output_throughput": "tokens/s",
            "median_ttft_ms": "TTFT, ms",
            "p99_ttft_ms": "TTFT p99",
            "median_tpot_ms": "TPOT, ms",
            "p99_tpot_ms": "TPOT p99",
        },
    ),
    "gpu_speedup": lambda: pick(
        rows_of("real_weights_h100"),
        {
            "method": "method",
            "batch": "batch",
            "plain tokens/s": "tokens/s, plain",
            "with drafts": "with drafts",
            "speedup": "speedup",
        },
    ),
    "gpu_adaptive": lambda: pick(
        [
            {**row, "ratio": "{:.2f} [{:.2f}, {:.2f}]".format(*row["adaptive / best"])}
            for row in rows_of("adaptive_h200", 0)
        ],
        {
            "drafter": "drafter",
            "concurrency": "concurrency",
            **{f"k = {k}": f"k = {k}" for k in (1, 2, 4, 7)},
            "adaptive": "adaptive",
            "ratio": "adaptive / best",
        },
    ),
    "gpu_verify": lambda: pick(
        verify(),
        {
            "batch": "batch",
            "context": "context",
            "plain ms": "plain, ms",
            "verify ms": "verify, ms",
            "verify / plain": "verify / plain",
            "flattened / plain": "flattened / plain",
        },
    ),
    "gpu_rates": lambda: pick(
        rows_of("end_to_end_h100"),
        {
            "batch": "batch",
            "rate": "acceptance rate",
            "speedup": "speedup",
            "plain ms": "plain step, ms",
            "verify ms": "verify step, ms",
            "draft ms": "drafting, ms",
        },
    ),
    "gpu_rounds": lambda: pick(
        rounds(),
        {
            "batch": "batch",
            "eagle": "EAGLE, ms",
            "eagle3": "EAGLE-3, ms",
            "dflash": "DFlash, ms",
            "ratio": "DFlash / EAGLE",
        },
    ),
    "gpu_rules": lambda: pick(
        rules(),
        {"rule": "rule", "cells": "cells", "geometric mean": "geometric mean", "worst": "worst cell"},
    ),
    "pairs": lambda: pick(
        pairs(),
        {
            "target": "target",
            "drafter": "draft model",
            "length": "mean acceptance length",
            "speedup": "speedup (quartiles)",
        },
    ),
    "gaudi_vendor": lambda: pick(
        (
            row | {"counted": VENDOR_ROWS[row["counted"]]}
            for row in rows_of("gaudi_vendor")
            if row["counted"] in VENDOR_ROWS
        ),
        {
            "counted": "counted on the emulated card",
            "vllm-gaudi": "vllm-gaudi",
            "ours": "here",
            "vllm-gaudi, n-gram, k = 3": "vllm-gaudi, n-grams",
            "ours, n-gram, k = 3": "here, n-grams",
        },
    ),
}


def write(check: bool) -> list[Path]:
    """Write the parts and plots, and return the files that differed."""
    parts: dict[str, Callable[[], str]] = {
        "options": options,
        "speculative": speculative,
        "environment": environment,
        "metrics": metrics,
        "recurrent": recurrent,
        "media": media,
        **{f"command-{name}": lambda name=name: command(name) for name in COMMANDS},  # type: ignore[misc]
        **PARTS,
    }
    made = {DOCS / "figures" / f"{name}.svg": draw() for name, draw in PLOTS.items()}
    for page in sorted(DOCS.rglob("*.md")):
        made[page] = _PART.sub(lambda part: f"{part[1]}\n{parts[part[2]]()}\n{part[3]}", page.read_text())
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    if not check:
        for path in stale:
            path.write_text(made[path])
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a file is stale")
    check = parser.parse_args().check
    stale = write(check)
    for path in stale:
        print(f"{path.relative_to(DOCS.parent)}: {'stale, run make docs-reference' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
