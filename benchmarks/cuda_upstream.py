"""Compare this platform with upstream's CUDA platform: decoding, sampling, drafts and prompts.

python -m benchmarks cuda_upstream --json .bench/cuda_upstream.json
python -m benchmarks cuda_upstream --size tiny --batches 1 4 --prompts 32    # a try; VGS_DEVICE names another device

Engines live side by side, each in a process of its own, and take turns. Upstream's are its newer and its older model
runner; where its compiled kernels are missing, this platform runs alone, and the table says so. Models have the given
shape and random weights, and their drafts are accepted at a given rate; with `--size demo` they are the demo model and
its drafters.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import upstream
from benchmarks.shared import common, drafting, dummy
from benchmarks.shared.common import QUIET
from benchmarks.shared.turns import Engine, Turn, interval, ratio, side_by_side, take
from vllm_gaudi_spec.tools.io.command_line import Parser

# Without flashinfer, which upstream would sample with.
_UPSTREAM = {"VLLM_PLUGINS": "", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VGS_DEVICE": ""}
ENGINES = {
    "ours": {"VLLM_PLUGINS": "gaudi_spec", "VGS_DEVICE": os.environ.get("VGS_DEVICE") or "cuda"},
    "upstream, newer": {**_UPSTREAM, "VLLM_USE_V2_MODEL_RUNNER": "1"},
    "upstream, older": {**_UPSTREAM, "VLLM_USE_V2_MODEL_RUNNER": "0"},
}
KERNELS = "vllm._C_stable_libtorch"
METHODS = ("no speculation", "draft_model", "ngram", "eagle", "heterogeneous", "mtp")
DEMO = "demo"
FEWER_WORDS = 32000
"""Size of the vocabulary of a drafter that has some of the target's words under other ids."""
SAMPLING = {"greedy": (0.0, 1.0), "sampled": (0.7, 0.9)}
"""Temperature and top-p."""
STEP_TOKENS = 16384
"""Maximum tokens per step in every engine: upstream's offline default on a GPU of this size, where ours is 8,192."""
FIRST = 16
"""Tokens of the turns whose time is reported as that of prompts."""
STEPS = "vllm:iteration_tokens_total"
"""Metric that counts an engine's steps. Acceptance varies from turn to turn, unlike the time of a step."""


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [*dummy.DRAFTERS, DEMO]
    parser.add_argument("--size", choices=sizes, default="8b", help="size of models with random weights, or the demo")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}"
    )
    parser.add_argument(
        "--sampling", nargs="+", choices=SAMPLING, default=list(SAMPLING), metavar="S", help="greedy, sampled or both"
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
        common.log(f"{method}, prompts of {prompt}: starting {', '.join(engines_here())} ...")

        def start(name: str) -> Engine | str:
            log = f"cuda_upstream-{method}-{prompt}-{name}".replace(" ", "-").replace(",", "")
            # What upstream compiles is kept by engine: they start together.
            environment = QUIET | engines_here()[name] | {"VLLM_CACHE_ROOT": str(common.LOGS / f"cache-{name}")}
            try:
                return Engine(log, model, environment, prompt, **settings)
            except RuntimeError as error:
                return str(error)

        with ThreadPoolExecutor() as pool:
            started = dict(zip(engines_here(), pool.map(start, engines_here()), strict=True))
        absent = {name: engine for name, engine in started.items() if isinstance(engine, str)}
        engines.update((name, engine) for name, engine in started.items() if isinstance(engine, Engine))
        for name, reason in absent.items():
            # Not every method is in both of upstream's runners.
            common.log(f"{name} does not start: {reason}")
        if "ours" in absent:
            raise RuntimeError(absent["ours"])
        for name, engine in engines.items():
            common.check_platform(name.partition(",")[0], engine.platform)
            common.log(f"   {name}: started in {engine.startup_s:.0f} s")
        cells = [measure_cell(engines, batch, name, options) for batch in options.batches for name in options.sampling]
        startup = {name: engine.startup_s for name, engine in engines.items()}
    return {"method": method, "prompt": prompt, "cells": cells, "absent": absent, "startup_s": startup}


def configure(method: str, prompt: int, options: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """A model and the options that all engines share."""
    length = prompt + options.tokens + options.drafts + 1
    settings: dict[str, Any] = {"max_model_len": length, "max_num_seqs": max(options.batches)}
    settings["max_num_batched_tokens"] = max(STEP_TOKENS, length)
    if options.size == DEMO:
        if method not in upstream.METHODS:
            raise RuntimeError(f"the demo model has no weights for {method}: leave --size {DEMO}, or name --methods")
        from vllm_gaudi_spec.tools.demo_model import demo_model_path

        model, config = demo_model_path(), upstream.METHODS[method]
        per_token = 2 * common.kv_bytes_per_token(common.model_folder(model), 4)
    else:
        dtype, sizes = dummy.DTYPES[options.size], (options.size, dummy.DRAFTERS[options.size])
        model, config = of_shape(method, *sizes, folder)
        settings |= dict(load_format="dummy", dtype=dtype)
        per_token = sum(dummy.kv_bytes(dummy.SIZES[size], dtype) for size in sizes)
        if config is not None:
            rates = dummy.rates_of(options.rate, options.drafts)
            config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    if config is not None:
        settings["speculative_config"] = {**config, "num_speculative_tokens": options.drafts}
    # Several engines share the card: each takes what this run can fill, and looks for no more.
    num_bytes = int(1.1 * per_token * max(options.batches) * (length + 128))
    return model, settings | dict(kv_cache_memory_bytes=num_bytes, gpu_memory_utilization=0.25)


def of_shape(method: str, size: str, drafter: str, folder: Path) -> tuple[str, dict[str, Any] | None]:
    """A target with random weights and its drafter."""
    if method == "mtp":
        mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
        return dummy.write_model(folder, size, **mimo), {"method": "mtp"}
    if method == "heterogeneous":
        many = dummy.SIZES[size]["vocab_size"]
        few = min(FEWER_WORDS, many // 2)
        words = [f"w{number}" for number in range(3, many)]
        draft = dummy.write_model(folder, drafter, words[few - 4 :: -1], vocab_size=few)
        config = {"method": "draft_model", "model": draft, "use_heterogeneous_vocab": True}
        return dummy.write_model(folder, size, words), config
    target = dummy.write_model(folder, size)
    if method == "draft_model":
        return target, {"method": method, "model": dummy.write_model(folder, drafter)}
    if method == "eagle":
        head = dummy.write_model(folder / "head", size, num_hidden_layers=1)
        return target, {"method": method, "model": head}
    return target, dict(drafting.NGRAM) if method == "ngram" else None


def measure_cell(engines: dict[str, Engine], batch: int, sampling: str, options: argparse.Namespace) -> dict[str, Any]:
    def turn(engine: Engine, tokens: int) -> np.ndarray:
        """Return the seconds and the number of steps."""
        before = engine.counter(STEPS)
        seconds = engine.turn(batch, tokens, *SAMPLING[sampling])
        return np.array([seconds, engine.counter(STEPS) - before])

    def turns(tokens: int, count: int) -> list[dict[str, np.ndarray]]:
        return take(engines, count, lambda engine: turn(engine, tokens))

    turns(FIRST, 1)
    first, whole = turns(FIRST, options.turns), turns(options.tokens, options.turns)
    # Beyond the first tokens all requests decode.
    decoding = [
        {name: after[name] - before[name] for name in engines} for before, after in zip(first, whole, strict=True)
    ]
    prompts = [{name: float(one[name][0]) for name in engines} for one in first]
    seconds = [{name: float(one[name][0]) for name in engines} for one in decoding]
    steps = [{name: float(one[name][0] / one[name][1]) for name in engines} for one in decoding]
    others = [name for name in engines if name != "ours"]
    best = min(others, key=lambda name: median(turn[name] for turn in steps), default=None)

    def middle(turns: list[Turn]) -> dict[str, float]:
        return {name: median(turn[name] for turn in turns) for name in engines}

    cell = {
        "batch": batch,
        "sampling": sampling,
        "tok_s": {name: batch * (options.tokens - FIRST) / value for name, value in middle(seconds).items()},
        "step_ms": {name: 1e3 * value for name, value in middle(steps).items()},
        "prompt_ms": {name: 1e3 * value for name, value in middle(prompts).items()},
        "ratios": [best and ratio(part, "ours", best) for part in (seconds, steps, prompts)],
    }
    common.log(f"   B = {batch}, {sampling}: {cell['tok_s']}, steps {cell['step_ms']}, prompts {cell['prompt_ms']}")
    return cell


# ---- showing -------------------------------------------------------------------------------------------


FIGURES = {
    "tok_s": ("tokens/s", ".0f"),
    "step_ms": ("ms a step", ".2f"),
    "prompt_ms": (f"prompts and {FIRST} tokens, ms", ".0f"),
}


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = list(engines_here())
    header = ["method", "prompt", "sampling", "B"]
    header += [f"{title}, {name}" for title, _ in FIGURES.values() for name in names]
    header += [f"ratio of {part}" for part in ("tokens/s", "steps", "prompts")]
    lines = []
    for row in rows:
        for cell in row["cells"]:
            figures = [
                format(cell[figure][name], digits) if name in cell[figure] else ""
                for figure, (_, digits) in FIGURES.items()
                for name in names
            ]
            ratios = [interval(value) if value else "" for value in cell["ratios"]]
            lines.append([row["method"], str(row["prompt"]), cell["sampling"], str(cell["batch"]), *figures, *ratios])
    common.log(f"\nk = {options.drafts}, {options.tokens} tokens, {options.turns} turns each\n")
    common.log(common.markdown(header, lines))
    if len(names) == 1:
        common.log(f"\nUpstream did not run: there is no {KERNELS} here.")


def measure_all(options: argparse.Namespace) -> None:
    rows = [measure(method, prompt, options) for prompt in options.prompts for method in options.methods]
    show(rows, options)
    machine = dummy.describe_machine() | {"upstream": len(engines_here()) > 1}
    settings = ("size", "drafts", "rate", "tokens", "turns", "prompts")
    common.write_rows(options, settings, rows, machine=machine)


def main() -> int:
    options = parse_options()
    return drafting.run_whole(lambda: measure_all(options))
