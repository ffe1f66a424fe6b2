"""Tokens/s with drafts, beside no speculation and beside the ideal, in one process.

python benchmarks/end_to_end.py --json .bench/end_to_end.json
VGS_DEVICE=cuda python benchmarks/end_to_end.py --size 8b --json .bench/end_to_end.json

Models have random weights, so drafts are accepted at given rates (the synthetic rule): each of them with the same
probability where all before it were. Requests of one length are served at once, and counted while all of them decode;
scheduling is asynchronous. With drafts and without, the engine is the same.

The ideal is acceptance length x plain step / (verify + draft), of the device's own times: the graphs of a step that was
served, run again alone. What is missing to it are gaps in which the device waits for the host. The share of the time in
which it is idle is measured twice: by the clock, as what a step takes beyond its programs, and on an accelerator by the
profiler, as gaps between kernels.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common
import device_trace
import dummy
import speculation_common as shared
from serving import Counted, Served, Tape

from vllm_gaudi_spec.tools.compare.phases import Phases
from vllm_gaudi_spec.tools.io.command_line import Parser

DEFAULTS = {
    "8b": {"batches": [1, 8, 32, 64], "prompt": 512, "steps": 100},
    "1.5b": {"batches": [1, 8, 32, 64], "prompt": 512, "steps": 100},
    "tiny": {"batches": [1, 4], "prompt": 32, "steps": 5},
}
ASKED = 0.85


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--size", choices=dummy.DRAFTERS, default="tiny", help="size of target and drafter")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="batch sizes (default: by --size)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.7, 0.9], metavar="P", help="acceptance rates")
    common.add_num_drafts(parser, "k", 4)
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of each prompt (default: by --size)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps that are counted (default: by --size)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="times that each graph is run alone")
    common.add_json(parser)
    options = parser.parse_args()
    for name, value in DEFAULTS[options.size].items():
        setattr(options, name, getattr(options, name) or value)
    return options


def longest(options: argparse.Namespace) -> int:
    """Every token that a request may have in a turn, with room for the steps that are not counted."""
    return options.prompt + (1 + options.k) * (2 * options.steps + 64) + 128


def engine(options: argparse.Namespace) -> Any:
    rows, max_len = max(options.batches), longest(options)
    dtype, sizes = dummy.DTYPES[options.size], (options.size, dummy.DRAFTERS[options.size])
    per_token = sum(dummy.kv_bytes(dummy.SIZES[size], dtype) for size in sizes)
    return dummy.engine(
        options.size,
        {
            "method": "draft_model",
            "num_speculative_tokens": options.k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": dummy.rates_of(options.rates[0], options.k),
        },
        dummy.DRAFTERS[options.size],
        max_model_len=max_len,
        max_num_seqs=rows,
        max_num_batched_tokens=8 * max(options.prompt, rows),
        kv_cache_memory_bytes=int(1.1 * per_token * (rows + 1) * (max_len + 128)),
        async_scheduling=True,
        gaudi_spec={
            "batch_buckets": options.batches,
            "prefill_buckets": [options.prompt, max_len],
            "prefill_rows": [1],
            "warmup_tokens": 0,
        },
    )


def set_rate(runner: Any, rates: list[float]) -> None:
    """Where captured programs read them."""
    import torch

    rates_K = runner.device_step.rule.args[-1].keywords["rates_K"]
    with torch.inference_mode():
        rates_K.copy_(rates_K.new_tensor(rates))


# ---- turns ---------------------------------------------------------------------------------------------


def turn(llm: Any, tape: Tape, options: argparse.Namespace, batch: int, num_drafts: int) -> dict[str, Any]:
    """A batch served: its speed, its programs' own times, the host's work, and the device's gaps."""
    runner, vocab = dummy.runner_of(llm), dummy.SIZES[options.size]["vocab_size"]
    served = Served(llm, batch, options.prompt, num_drafts, vocab, longest(options) - options.prompt - options.k - 1)
    half = options.steps // 2
    before = served.run(half)
    # In the middle: contexts are about as long as in the mean step.
    device_s = tape.seconds(options.repeats)
    served.warm_up()
    found: dict[str, Any] = mean(before, served.run(options.steps - half))
    found["device_s"] = device_s
    watched = max(options.steps // 4, 2)
    with Phases().watching(runner) as phases:
        served.run(watched)
    found["host_s"] = {name: seconds / watched for name, seconds in phases.take().items() if name != "wait"}
    if dummy.on_accelerator():
        found["trace"] = device_trace.table_of(device_trace.record(lambda: served.run(watched)), watched)
    served.end()
    return found


def mean(first: Counted, second: Counted) -> dict[str, float]:
    """Of a request and a step."""
    steps, seconds, tokens = (sum(pair) for pair in zip(first[:3], second[:3], strict=True))
    return {
        "step_s": seconds / steps,
        "tok_s": tokens / seconds,
        "tokens_per_step": tokens / steps / first.requests,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with engine(options) as llm:
        runner = dummy.runner_of(llm)
        tape = Tape(runner)
        for batch in options.batches:
            plain = turn(llm, tape, options, batch, 0)
            for rate in options.rates:
                set_rate(runner, dummy.rates_of(rate, options.k))
                drafted = turn(llm, tape, options, batch, options.k)
                rows.append(
                    {"batch": batch, "rate": rate, **figures(plain, drafted), "plain": plain, "drafted": drafted}
                )
                common.log(f"batch {batch}, rate {rate}: {rows[-1]['speedup']:.2f} of {rows[-1]['ideal_speedup']:.2f}")
    return rows


def figures(plain: dict[str, Any], drafted: dict[str, Any]) -> dict[str, float]:
    plain_s, whole_s = sum(plain["device_s"].values()), sum(drafted["device_s"].values())
    draft_s = drafted["device_s"].get("draft", 0.0)
    speedup = drafted["tok_s"] / plain["tok_s"]
    # Both by the clock for plain steps, or a device that waits in these would look like speed of those with drafts.
    ideal = drafted["tokens_per_step"] * plain["step_s"] / whole_s
    host_s = sum(drafted["host_s"].values())
    return {
        "plain_tok_s": plain["tok_s"],
        "drafted_tok_s": drafted["tok_s"],
        "speedup": speedup,
        "tokens_per_step": drafted["tokens_per_step"],
        "plain_ms": 1e3 * plain_s,
        "verify_ms": 1e3 * (whole_s - draft_s),
        "draft_ms": 1e3 * draft_s,
        "ideal_speedup": ideal,
        "of_ideal": speedup / ideal,
        "step_ms": 1e3 * drafted["step_s"],
        "idle_by_clock": 1 - whole_s / drafted["step_s"],
        "host_ms": 1e3 * host_s,
        "host_over_device": host_s / whole_s,
    }


# ---- output --------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = ["batch", "rate", "plain_tok_s", "drafted_tok_s", "speedup", "tokens_per_step", "plain_ms", "verify_ms"]
    names += ["draft_ms", "ideal_speedup", "of_ideal", "step_ms", "idle_by_clock", "host_ms", "host_over_device"]
    header = [name.replace("_tok_s", " tokens/s").replace("_", " ") for name in names]
    lines = [[_text(name, row[name]) for name in names] for row in rows]
    common.log(f"\n{options.size} dummy weights, k = {options.k}, prompts of {options.prompt} tokens; asked: {ASKED}")
    common.log(f"of the ideal\n\n{shared.markdown(header, lines)}")
    traces = [row for row in rows if "trace" in row["drafted"]]
    if not traces:
        return
    columns = list(traces[0]["drafted"]["trace"])
    lines = [
        [str(row["batch"]), turn, *(_text(name, row[kind]["trace"][name]) for name in columns)]
        for row in traces
        for turn, kind in ((f"k = {options.k}, {row['rate']}", "drafted"), ("plain", "plain"))
        if kind == "drafted" or row["rate"] == options.rates[0]
    ]
    header = ["batch", "steps are", *(name.replace("_", " ") for name in columns)]
    common.log(f"\nthe device, by torch's profiler; of one step\n\n{shared.markdown(header, lines)}")


def _text(name: str, value: float) -> str:
    if isinstance(value, int):
        return str(value)
    digits = 0 if name.endswith(("_tok_s", "_us")) else 3 if name.startswith("idle") else 2
    return f"{value:.{digits}f}"


def main() -> int:
    options = parse_options()
    common.warn_if_busy()
    rows = measure(options)
    show(rows, options)
    common.write_rows(options, ("size", "k", "prompt", "steps"), rows, dummy.describe_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
