"""This platform beside upstream's CPU platform where models, contexts and prompts are longer than the demo's.

python benchmarks/upstream_shapes.py --json .bench/upstream_shapes.json
python benchmarks/upstream_shapes.py --sizes tiny --contexts 128 --batches 1 2 --prompts 128    # a try

Models have the given shape and random weights of bfloat16, served in float32 without drafts. Both engines live side by
side, each in processes of its own, and take turns; upstream's runs eagerly. Decode steps come after contexts that the
prefix cache has. Prompts are timed to the first token of one request that no cache knows. Servers are
benchmarks/upstream_server.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import common
import dummy
import speculation_common as shared
import torch
from common import PLATFORMS, QUIET
from cuda_upstream import SAMPLING
from turns import Engine, Turn, interval, ratio, side_by_side, take

from vllm_gaudi_spec.tools.io.command_line import Parser

SIZES = ("0.5b", "1.5b", "tiny")
# Upstream keeps a core for its scheduler. Without the reserve its model runs on all of them.
NO_RESERVE = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
BLOCK = 128
"""Upstream's blocks are the larger ones."""


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5b"], metavar="S", help=f"of {SIZES}")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[256, 2048, 8192],
        metavar="N",
        help=f"tokens before those counted, in {BLOCK}s",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32], metavar="B", help="batch sizes")
    parser.add_argument(
        "--sampling", nargs="+", choices=SAMPLING, default=list(SAMPLING), metavar="S", help="greedy, sampled or both"
    )
    parser.add_argument(
        "--most-tokens", type=int, default=16384, metavar="N", help="leave out cells with longer contexts in all"
    )
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024], metavar="N", help="tokens of prompts")
    parser.add_argument("--all-cores", action="store_true", help="upstream without the core that it keeps free")
    common.add_output_len(parser, 17)
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="measured turns of each engine and cell")
    common.add_json(parser)
    options = parser.parse_args()
    if any(context % BLOCK for context in options.contexts):
        parser.error(f"--contexts: multiples of {BLOCK}, which the prefix cache has whole")
    return options


# ---- measuring -----------------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> list[tuple[int, int, str]]:
    """Context, batch, sampling; the largest batch of a context first, whose contexts the others share."""
    batches = sorted(options.batches, reverse=True)
    every = product(options.contexts, batches, options.sampling)
    return [(context, batch, how) for context, batch, how in every if context * batch <= options.most_tokens]


def measure(size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    longest = max(*options.contexts, *options.prompts, 0) + 1 + options.tokens
    num_rows = max(options.batches)
    # What each request adds to its context starts a block of its own.
    num_tokens = options.most_tokens + num_rows * (options.tokens + 2 * BLOCK) + longest
    settings: dict[str, Any] = dict(
        enable_prefix_caching=True,
        kv_cache_memory_bytes=num_tokens * dummy.kv_bytes(dummy.SIZES[size], torch.float32),
        max_model_len=longest,
        max_num_seqs=num_rows,
    )
    with tempfile.TemporaryDirectory() as folder, side_by_side() as engines:
        model = dummy.write_model(Path(folder), size, tie_word_embeddings=True)
        dummy.write_weights(model)
        for platform, environment in PLATFORMS.items():
            common.log(f"{size}: starting {platform} ...")
            log = f"upstream_shapes-{size}-{platform}"
            more = NO_RESERVE if options.all_cores and platform == "upstream" else {}
            eager = platform == "upstream"
            engines[platform] = Engine(log, model, QUIET | environment | more, longest, enforce_eager=eager, **settings)
            common.check_platform(platform, engines[platform].platform)
        prompts = [measure_prompt(engines, prompt, options) for prompt in options.prompts]
        decodes = [measure_decode(engines, *cell, options) for cell in cells_of(options)]
    return [{"size": size} | row for row in (*prompts, *decodes)]


def measure_prompt(engines: dict[str, Engine], prompt: int, options: argparse.Namespace) -> dict[str, Any]:
    turns = take(engines, options.turns + 1, lambda engine: engine.turn(1, 1, prompt=prompt, forget=True))[1:]
    return row_of(f"first token after a prompt of {prompt}", 1, "greedy", turns)


def measure_decode(
    engines: dict[str, Engine], context: int, batch: int, how: str, options: argparse.Namespace
) -> dict[str, Any]:
    def turns(tokens: int, count: int) -> list[Turn]:
        # The cache has whole blocks, and never a prompt's last token.
        return take(engines, count, lambda engine: engine.turn(batch, tokens, *SAMPLING[how], prompt=context + 1))

    turns(2, 1)  # reads what of the contexts is not cached yet
    first = turns(1, 2)
    before = {name: median(turn[name] for turn in first) for name in engines}
    whole = turns(options.tokens, options.turns)
    steps = [{name: (turn[name] - before[name]) / (options.tokens - 1) for name in engines} for turn in whole]
    return row_of(f"a token after a context of {context}", batch, how, steps)


def row_of(what: str, batch: int, how: str, turns: list[Turn]) -> dict[str, Any]:
    row = {
        "what": what,
        "batch": batch,
        "sampling": how,
        "ms": {name: 1e3 * median(turn[name] for turn in turns) for name in PLATFORMS},
        "ratio": ratio(turns, "ours", "upstream"),
    }
    common.log(f"   {what}, batch {batch}, {how}: {row['ms']}, {interval(row['ratio'])}")
    return row


# ---- showing -------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    lines = []
    for row in rows:
        speeds = [f"{row['ms'][platform]:.1f}" for platform in PLATFORMS]
        lines.append([row["size"], row["what"], str(row["batch"]), row["sampling"], *speeds, interval(row["ratio"])])
    common.log(f"\nfloat32, {options.tokens - 1} tokens a request, {options.turns} turns each\n")
    common.log(shared.markdown(["shape", "time of", "batch", "sampling", "ms, ours", "upstream's", "ratio"], lines))
    ratios = [row["ratio"][0] for row in rows]
    common.log(f"\nmedian ratio {median(ratios):.2f}, least {min(ratios):.2f}\n\n{common.NOISE_NOTE}")


def measure_all(options: argparse.Namespace) -> None:
    common.warn_if_busy()
    rows = []
    for size in options.sizes:
        rows += measure(size, options)
        # What is there already, should a later one fail.
        common.write_rows(options, ("tokens", "turns", "most_tokens", "all_cores"), rows)
    show(rows, options)


def main() -> int:
    options = parse_options()
    return shared.run_whole(lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
