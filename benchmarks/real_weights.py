"""Acceptance and tokens/s together, with real weights: the demo model and its three trained drafters.

VGS_DEVICE=cuda python benchmarks/real_weights.py --json .bench/real_weights.json

Each drafter has an engine of its own; in it the same prompts are answered with drafts and without (requests that ask
for 0) in turns, with so many requests at a time. Tokens/s are medians and include the prompts; a speedup's interval is
Student's t over the turns. Without VGS_DEVICE it runs on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

import common
import dummy
import speculation_common as shared
from turns import interval, ratio

from vllm_gaudi_spec.tools.demo_model import demo_model_path
from vllm_gaudi_spec.tools.io.command_line import Parser

METHODS = {
    "draft_model": shared.SAME_VOCAB,
    "universal_draft": shared.OTHER_VOCAB,
    "eagle": shared.EAGLE,
}
MAX_LEN = 512


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="batch sizes (concurrency)"
    )
    common.add_num_drafts(parser, "k", 4)
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of each kind (default: all, 24 and 8)")
    common.add_output_len(parser, 128)
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="measured turns with drafts and without")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter")
    common.add_json(parser)
    return parser.parse_args()


def measure(options: argparse.Namespace, method: str) -> list[dict[str, Any]]:
    from vllm.tokenizers import get_tokenizer

    model, rows = demo_model_path(), []
    texts = [text for some in shared.prompt_sets(options.prompts).values() for text in some]
    prompts = shared.encode(get_tokenizer(model), texts, bos=False)
    with shared.engine(
        model,
        {**METHODS[method], "num_speculative_tokens": options.k},
        dtype=options.dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=4 * MAX_LEN,
        kv_cache_memory_bytes=1 << 30,
        per_request_spec_decode_metrics="detailed",
        additional_config={"gaudi_spec": {"batch_buckets": options.batches, "warmup_tokens": 0}},
    ) as llm:
        for batch in options.batches:
            kinds = {"plain": 0, "drafted": options.k}
            # The first turn is not counted: what is captured on first use is captured there.
            turns = [
                {name: in_groups(llm, prompts, batch, options.tokens, kinds[name]) for name in order}
                for order in ([*kinds] if number % 2 else [*reversed(kinds)] for number in range(1 + options.turns))
            ][1:]
            rows.append({"method": method, "batch": batch, "k": options.k, **figures(turns, options.k)})
            common.log(f"   {method}, B = {batch}: {interval(rows[-1]['speedup'])}")
    return rows


def in_groups(llm: Any, prompts: list[list[int]], batch: int, tokens: int, drafts: int) -> dict[str, Any]:
    """So many prompts at a time."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    asked = [shared.ask(llm, group, 0.0, tokens, drafts) for group in groups]
    requests = [request for one in asked for request in one["requests"]]
    seconds = sum(one["seconds"] for one in asked)
    return {"requests": requests, "seconds": seconds}


def figures(turns: list[dict[str, dict[str, Any]]], k: int) -> dict[str, Any]:
    requests = turns[-1]["drafted"]["requests"]
    rates = shared.Rates(requests, k)
    length = rates.tokens_per_step()
    seconds = [{name: turn[name]["seconds"] for name in turn} for turn in turns]
    tokens = sum(1 + request["tokens"] for request in requests)
    return {
        "plain_tok_s": tokens / median(turn["plain"] for turn in seconds),
        "drafted_tok_s": tokens / median(turn["drafted"] for turn in seconds),
        "seconds": seconds,
        "speedup": ratio(seconds, "drafted", "plain"),
        "tokens_per_step": vars(length),
        "accepted_at": [vars(rate) for rate in rates.positions()],
    }


def show(rows: list[dict[str, Any]], dtype: str) -> None:
    header = [
        "method",
        "batch",
        "k",
        "plain tokens/s",
        "drafted tokens/s",
        "speedup",
        "tokens a step",
        "accepted at 1, 2, ...",
    ]
    lines = [
        [
            row["method"],
            str(row["batch"]),
            str(row["k"]),
            f"{row['plain_tok_s']:.0f}",
            f"{row['drafted_tok_s']:.0f}",
            interval(row["speedup"]),
            str(shared.Estimate(**row["tokens_per_step"])),
            ", ".join(f"{rate['value']:.2f}" for rate in row["accepted_at"]),
        ]
        for row in rows
    ]
    common.log(f"\nSmolLM2-135M-Instruct, {dtype}, greedy\n\n{shared.markdown(header, lines)}")


def main() -> int:
    options = parse_options()
    dummy.keep_engine_here()
    rows = [row for method in options.methods for row in measure(options, method)]
    show(rows, options.dtype)
    common.write_rows(options, ("tokens", "prompts", "dtype", "turns"), rows, dummy.describe_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
