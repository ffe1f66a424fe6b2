"""This platform beside upstream's CUDA platform, on one GPU: decoding, sampling, drafts and prompts.

python benchmarks/cuda_upstream.py --json .bench/cuda_upstream.json
python benchmarks/cuda_upstream.py --size tiny --batches 1 4 --prompts 32    # a try; VGS_DEVICE=cpu for the CPU

Engines live side by side, each in a process of its own, and take turns. Upstream's are its newer model runner and its
older one; without its compiled kernels (docs/performance.md says how they are brought) this platform runs alone, and
the table says so. Methods with weights (n-gram, EAGLE, universal drafting) use the demo model; `no speculation` and
`draft_model` models of the given shape with random weights, whose drafts are accepted at a given rate.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import common
import dummy
import speculation_common as shared
import upstream
from common import QUIET
from end_to_end import DRAFTERS, rates_of
from turns import Engine, interval, ratio, side_by_side, take

from vllm_gaudi_spec.tools.io.command_line import Parser

# Without flashinfer, which upstream would sample with.
_UPSTREAM = {"VLLM_PLUGINS": "", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VGS_DEVICE": ""}
ENGINES = {
    "ours": {"VLLM_PLUGINS": "gaudi_spec", "VGS_DEVICE": os.environ.get("VGS_DEVICE") or "cuda"},
    "upstream, newer": {**_UPSTREAM, "VLLM_USE_V2_MODEL_RUNNER": "1"},
    "upstream, older": {**_UPSTREAM, "VLLM_USE_V2_MODEL_RUNNER": "0"},
}
KERNELS = "vllm._C_stable_libtorch"
OF_SHAPE = ("no speculation", "draft_model")
WITH_WEIGHTS = ("ngram", "eagle", "heterogeneous")
SAMPLING = {"greedy": (0.0, 1.0), "T 0.7, top-p 0.9": (0.7, 0.9)}
FIRST = 16
"""Tokens of the turns whose whole time is reported as that of prompts."""


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=DRAFTERS, default="8b", help="size of models with random weights")
    methods = [*OF_SHAPE, *WITH_WEIGHTS]
    parser.add_argument(
        "--methods", nargs="+", choices=methods, default=methods, metavar="METHOD", help=f"of {', '.join(methods)}"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], metavar="B", help="batch sizes")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[512, 4096], metavar="N", help="tokens of prompts (default: 512 4096)"
    )
    common.add_num_drafts(parser, "drafts", 4)
    parser.add_argument("--rate", type=float, default=0.7, metavar="P", help="acceptance of a draft of random weights")
    common.add_output_len(parser, 256)
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="measured turns of each engine and cell")
    common.add_json(parser)
    return parser.parse_args()


# ---- measuring -----------------------------------------------------------------------------------------


def engines_here() -> dict[str, dict[str, str]]:
    return ENGINES if find_spec(KERNELS) else {"ours": ENGINES["ours"]}


def measure(method: str, prompt: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, side_by_side() as engines:
        model, settings = configure(method, prompt, options, Path(folder))
        absent = {}
        for name, environment in engines_here().items():
            common.log(f"{method}, prompts of {prompt}: starting {name} ...")
            log = f"cuda_upstream-{method}-{prompt}-{name}".replace(" ", "-").replace(",", "")
            try:
                engines[name] = Engine(log, model, {**QUIET, **environment}, prompt, **settings)
            except RuntimeError as error:
                if name == "ours":
                    raise
                # Not every method is in both of upstream's runners.
                absent[name] = str(error)
                common.log(f"{name} does not start: {error}")
                continue
            common.check_platform(name.partition(",")[0], engines[name].platform)
        cells = [measure_cell(engines, batch, sampling, options) for batch in options.batches for sampling in SAMPLING]
    return {"method": method, "prompt": prompt, "cells": cells, "absent": absent}


def configure(method: str, prompt: int, options: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """A model, and the options of every engine."""
    length = prompt + options.tokens + options.drafts + 1
    settings: dict[str, Any] = {"max_model_len": length, "max_num_seqs": max(options.batches)}
    config, room = None, max(options.batches) * (length + 128)
    if method in OF_SHAPE:
        dtype, sizes = dummy.DTYPES[options.size], (options.size, DRAFTERS[options.size])
        model = dummy.write_model(folder, options.size)
        settings |= dict(load_format="dummy", dtype=dtype)
        num_bytes = sum(dummy.kv_bytes(dummy.SIZES[size], dtype) for size in sizes) * room
        if method == "draft_model":
            config = {
                "method": method,
                "model": dummy.write_model(folder, DRAFTERS[options.size]),
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates_of(options.rate, options.drafts),
            }
    else:
        from vllm_gaudi_spec.tools.demo_model import demo_model_path

        model, config = demo_model_path(), upstream.METHODS[method]
        num_bytes = 2 * common.kv_bytes_per_token(common.model_folder(model), 4) * room
    if config is not None:
        settings["speculative_config"] = {**config, "num_speculative_tokens": options.drafts}
    # Several engines share the card: each takes what this run can fill, and looks for no more.
    return model, settings | dict(kv_cache_memory_bytes=int(1.2 * num_bytes), gpu_memory_utilization=0.3)


def measure_cell(engines: dict[str, Engine], batch: int, sampling: str, options: argparse.Namespace) -> dict[str, Any]:
    def turns(tokens: int, count: int) -> list[dict[str, float]]:
        return take(engines, count, lambda engine: engine.turn(batch, tokens, *SAMPLING[sampling]))

    turns(FIRST, 1)
    first, whole = turns(FIRST, options.turns), turns(options.tokens, options.turns)
    # Beyond the first tokens all requests decode.
    decoding = [
        {name: after[name] - before[name] for name in engines} for before, after in zip(first, whole, strict=True)
    ]
    counted = batch * (options.tokens - FIRST)
    others = [name for name in engines if name != "ours"]
    best = min(others, key=lambda name: median(turn[name] for turn in decoding), default=None)
    cell = {
        "batch": batch,
        "sampling": sampling,
        "tok_s": {name: counted / median(turn[name] for turn in decoding) for name in engines},
        "prompt_ms": {name: 1e3 * median(turn[name] for turn in first) for name in engines},
        "ratio": best and ratio(decoding, "ours", best),
        "prompt_ratio": best and ratio(first, "ours", best),
    }
    common.log(f"   B = {batch}, {sampling}: {cell['tok_s']}, prompts {cell['prompt_ms']}")
    return cell


# ---- showing -------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = list(engines_here())
    lines = []
    for row in rows:
        for cell in row["cells"]:
            numbers = [
                *(f"{cell['tok_s'][name]:.0f}" if name in cell["tok_s"] else "" for name in names),
                *(f"{cell['prompt_ms'][name]:.0f}" if name in cell["prompt_ms"] else "" for name in names),
                *(interval(cell[part]) if cell[part] else "" for part in ("ratio", "prompt_ratio")),
            ]
            lines.append([row["method"], str(row["prompt"]), cell["sampling"], str(cell["batch"]), *numbers])
    header = ["method", "prompt", "sampling", "B", *(f"tok/s, {name}" for name in names)]
    header += [*(f"prompts and {FIRST} tokens, ms, {name}" for name in names), "speed ratio", "prompt ratio"]
    common.log(f"\nk = {options.drafts}, {options.tokens} tokens, {options.turns} turns each\n")
    common.log(shared.markdown(header, lines))
    if len(names) == 1:
        common.log(f"\nUpstream did not run: there is no {KERNELS} here.")


def measure_all(options: argparse.Namespace) -> None:
    rows = [measure(method, prompt, options) for prompt in options.prompts for method in options.methods]
    show(rows, options)
    machine = common.describe_machine() | {"upstream": len(engines_here()) > 1}
    settings = ("size", "drafts", "rate", "tokens", "turns", "prompts")
    common.write_rows(options, settings, rows, machine=machine)


def main() -> int:
    options = parse_options()
    return shared.run_whole(lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
