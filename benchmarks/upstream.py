"""Compare this platform with upstream's on random or fixed cells.

python -m benchmarks upstream --cells 12 --seed 7 --json .bench/upstream.json
VGS_DEVICE=cuda python -m benchmarks upstream --cells 40 --seed 7 --json .bench/upstream.json
VGS_DEVICE=cuda python -m benchmarks upstream --prompt-lengths 20 --max-prompt-len 8000    # first tokens
python -m benchmarks upstream --fixed --max-batch 1    # fixed cells, for regressions

A cell is a batch of requests with lengths as in ShareGPT, a method with a number of drafts, and sampling parameters.
Engines run side by side, each in its own process, and take turns, and every turn has new prompts and seeds. A ratio is
the median over neighboring turns, after three turns of warm-up. Upstream runs with its default settings, on a CPU also
with all cores, and on CUDA also with its older model runner. With --size demo, the models are the demo model in float32
and its drafters; with any other size, weights are random, and drafts are accepted at a given rate. Cells that FILE
already contains are not measured again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import common, drafting, dummy
from benchmarks.shared.cells import GREEDY, PLAIN, SAMPLED, Cell, Limits, draw_cells, draw_prompt_cells, write_prompts
from benchmarks.shared.turns import Engine, interval, is_range, ratio, side_by_side, take
from vllm_gaudi_spec.environment import preload_openmp
from vllm_gaudi_spec.tools.io.command_line import Parser

DEVICE = os.environ.get("VGS_DEVICE") or "cpu"
OURS = "ours"
_UPSTREAM = {"VLLM_PLUGINS": "", "VGS_DEVICE": ""}
# FlashInfer is not installed with vLLM.
_CUDA = {**_UPSTREAM, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
UPSTREAM: dict[str, dict[str, dict[str, str]]] = {
    "cpu": {
        "upstream": _UPSTREAM,
        "upstream, all cores": {**_UPSTREAM, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
    },
    "cuda": {
        "upstream": {**_CUDA, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        "upstream, older": {**_CUDA, "VLLM_USE_V2_MODEL_RUNNER": "0"},
    },
}
CUDA_KERNELS = "vllm._C_stable_libtorch"
# Methods by upstream's names. Upstream's suffix drafter needs an additional package, and its ngram_gpu needs Triton.
DEMO_METHODS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "draft_model": drafting.SAME_VOCAB,
    "ngram": drafting.NGRAM,
    "eagle": drafting.EAGLE,
    "heterogeneous": {**drafting.OTHER_VOCAB, "method": "draft_model", "use_heterogeneous_vocab": True},
}
METHODS = (*DEMO_METHODS, "mtp")
DEMO = "demo"
REDUCED_VOCAB = 32000
"""Vocabulary size of a drafter that has some of the target's tokens under other IDs."""
LIMITS = {"cpu": Limits(8, 256, 32), "cuda": Limits(64, 4096, 96)}
FIXED = {
    "cpu": [
        Cell(method, 3 * (method != PLAIN), (32,) * batch, 32, *GREEDY) for method, batch in product(METHODS, (1, 4, 8))
    ],
    "cuda": [
        Cell(method, 4 * (method != PLAIN), (prompt,) * batch, 96, *sampling)
        for method, prompt, batch, sampling in product(METHODS, (512, 4096), (1, 8, 32, 64), (GREEDY, SAMPLED))
    ],
}
WARM_UP = 3
"""Number of turns for each engine and cell that are not counted."""
STEP_TOKENS = 16384
"""Maximum number of tokens per step on a card: upstream's offline default on a large GPU (ours is 8,192)."""
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
FIGURES = ("step", "whole", "prompts")
"""Seconds of a decode step in which all requests decode, of the whole batch, and until all have their first token."""


def parse_options() -> argparse.Namespace:
    kind = "cpu" if DEVICE == "cpu" else "cuda"
    limits = LIMITS[kind]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=12, metavar="N", help="cells to draw (default: 12)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw, of prompts and of sampling")
    parser.add_argument("--fixed", action="store_true", help="measure the fixed cells instead")
    parser.add_argument(
        "--prompt-lengths", type=int, metavar="N", help="measure N drawn prompt lengths at 1, 8 and 32 requests instead"
    )
    parser.add_argument(
        "--size",
        choices=[*dummy.DRAFTERS, DEMO],
        default=DEMO if kind == "cpu" else "8b",
        help="shape of a model with random weights, or the demo model (default on a CPU)",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument(
        "--setups", type=int, default=3, metavar="N", help="draws of a method and its drafts, which engines start for"
    )
    parser.add_argument("--max-batch", type=int, default=limits.batch, metavar="B", help="most requests of a cell")
    parser.add_argument(
        "--max-prompt-len", type=int, default=limits.prompt_tokens, metavar="N", help="most tokens of a prompt"
    )
    parser.add_argument(
        "--max-output-len", type=int, default=limits.output_tokens, metavar="N", help="most tokens of an output"
    )
    parser.add_argument("--rate", type=float, default=0.7, metavar="P", help="acceptance of a draft of random weights")
    parser.add_argument(
        "--enforce-eager",
        action="store_true",
        help="do not let upstream compile, for a try: it takes minutes per setup, and is kept for the next run",
    )
    add_against(parser)
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="measured turns of each engine and cell")
    parser.add_argument("--fresh", action="store_true", help="measure again what FILE has already")
    parser.add_argument("--json", type=Path, metavar="FILE", default=common.LOGS / "upstream.json", help="the results")
    options = parser.parse_args()
    keep_only(options.against)
    if options.size == DEMO:
        possible = tuple(DEMO_METHODS)
    else:
        # Upstream's CPU platform cannot accept drafts at a given rate.
        possible = METHODS if DEVICE != "cpu" else (PLAIN,)
    options.methods = options.methods or list(possible)
    if unknown := [method for method in options.methods if method not in possible]:
        parser.error(f"{', '.join(unknown)} cannot run with --size {options.size} on {DEVICE}: choose another --size")
    options.device = DEVICE
    options.limits = Limits(options.max_batch, options.max_prompt_len, options.max_output_len)
    if options.prompt_lengths:
        options.chosen = draw_prompt_cells(options.seed, options.prompt_lengths, options.max_prompt_len)
    elif options.fixed:
        options.chosen = [cell for cell in FIXED[kind] if cell.method in options.methods and cell.fits(options.limits)]
    else:
        options.chosen = draw_cells(options.seed, options.cells, options.methods, options.setups, options.limits)
    return options


def add_against(parser: argparse.ArgumentParser) -> None:
    names = [*UPSTREAM.get(DEVICE, ())]
    parser.add_argument(
        "--against", nargs="+", choices=names, default=names, metavar="ENGINE", help=f"of {'; '.join(names)}"
    )


def keep_only(names: list[str]) -> None:
    """Compare only with the given upstream engines."""
    if DEVICE in UPSTREAM:
        UPSTREAM[DEVICE] = {name: UPSTREAM[DEVICE][name] for name in names}


# ---- in an engine's process ----------------------------------------------------------------------------


def run_turn(cell: Cell, seed: tuple[int, ...], texts: str | None, llm: Any) -> dict[str, float]:
    """Run the requests of a cell, which generate past any end token, and return the seconds of `FIGURES`."""
    from vllm.sampling_params import RequestOutputKind

    encoded = [] if texts is None else drafting.encode(llm.get_tokenizer(), drafting.texts_named(texts), bos=False)
    engine, waiting, is_full = llm.llm_engine, set(), True
    requests = []
    for number, prompt in enumerate(write_prompts(cell, seed, encoded)):
        params = drafting.sampling(cell.temperature, cell.tokens, hash((*seed, number)) % 2**31)
        params.top_p, params.output_kind = cell.top_p, RequestOutputKind.DELTA
        requests.append((str(number), {"prompt_token_ids": prompt}, params))
    started = time.perf_counter()
    for request in requests:
        waiting.add(request[0])
        engine.add_request(*request)
    # The times at which the last request had its first token and at which later steps ended, until a request finished.
    full: list[float] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        waiting.difference_update(output.request_id for output in outputs)
        if outputs and not waiting and is_full:
            full.append(time.perf_counter() - started)
            is_full = not any(output.finished for output in outputs)
    times = {"whole": time.perf_counter() - started, "prompts": full[0]}
    return times | ({"step": (full[-1] - full[0]) / (len(full) - 1)} if len(full) > 1 else {})


# ---- measuring -----------------------------------------------------------------------------------------


def environments() -> dict[str, dict[str, str]]:
    """Return the environments of the engines that can run on this machine."""
    ours = {OURS: {"VLLM_PLUGINS": "gaudi_spec", "VGS_DEVICE": DEVICE}}
    if DEVICE == "cpu" or (DEVICE == "cuda" and find_spec(CUDA_KERNELS)):
        return ours | UPSTREAM[DEVICE]
    return ours


def configure(cells: list[Cell], options: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the model and the options that all engines of a setup share."""
    method, num_drafts = cells[0].setup
    # Use the same length for all setups, so that upstream compiles the target only once.
    length = max(cell.length for cell in options.chosen)
    settings: dict[str, Any] = {"max_model_len": length, "max_num_seqs": max(cell.batch for cell in options.chosen)}
    if options.size == DEMO:
        from vllm_gaudi_spec.tools.demo_model import demo_model_path

        model, config = demo_model_path(), DEMO_METHODS[method]
        per_token = 2 * common.kv_bytes_per_token(common.model_folder(model), 4)
    else:
        dtype, sizes = dummy.DTYPES[options.size], (options.size, dummy.DRAFTERS[options.size])
        model, config = write_models(method, *sizes, folder)
        settings |= dict(load_format="dummy", dtype=dtype)
        per_token = sum(dummy.kv_bytes(dummy.SIZES[size], dtype) for size in sizes)
        if config is not None:
            rates = dummy.rates_of(options.rate, num_drafts)
            config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    if config is not None:
        settings["speculative_config"] = {**config, "num_speculative_tokens": num_drafts}
    # Engines share the memory, so each of them takes only what these cells can fill.
    most = max(sum(cell.prompts) + cell.batch * (cell.length - max(cell.prompts) + 128) for cell in cells)
    settings["kv_cache_memory_bytes"] = int(1.1 * per_token * (most + length))
    if DEVICE == "cuda":
        settings |= dict(gpu_memory_utilization=0.25, max_num_batched_tokens=max(STEP_TOKENS, length))
    return model, settings


def write_models(method: str, size: str, drafter: str, folder: Path) -> tuple[str, dict[str, Any] | None]:
    """Write a target with random weights, and its drafter."""
    if method == "mtp":
        mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
        return dummy.write_model(folder, size, **mimo), {"method": "mtp"}
    if method == "heterogeneous":
        many = dummy.SIZES[size]["vocab_size"]
        few = min(REDUCED_VOCAB, many // 2)
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


def start(cells: list[Cell], options: argparse.Namespace, folder: Path) -> tuple[dict[str, Engine], dict[str, str]]:
    """Start the engines of a setup, and return them and the reasons why others did not start."""
    model, settings = configure(cells, options, folder)
    method, num_drafts = cells[0].setup

    def start_one(name: str) -> Engine | str:
        word = name.replace(" ", "-").replace(",", "")
        # Engines start at the same time, so each of them has its own cache for upstream's compiler.
        environment = common.QUIET | environments()[name] | {"VLLM_CACHE_ROOT": str(common.LOGS / f"cache-{word}")}
        try:
            log = f"upstream-{method.replace(' ', '-')}-{num_drafts}-{word}"
            is_eager = options.enforce_eager and name != OURS
            return Engine(log, model, environment, None, enforce_eager=is_eager, **settings)
        except RuntimeError as error:
            return str(error)

    common.log(f"{method}, k = {num_drafts}: starting {'; '.join(environments())} ...")
    with ThreadPoolExecutor() as pool:
        started = dict(zip(environments(), pool.map(start_one, environments()), strict=True))
    absent = {name: engine for name, engine in started.items() if isinstance(engine, str)}
    return {name: engine for name, engine in started.items() if isinstance(engine, Engine)}, absent


def measure_setup(cells: dict[int, Cell], options: argparse.Namespace, add: Callable[[str, Any], None]) -> None:
    """Measure the cells of a setup, keyed by their number."""
    with tempfile.TemporaryDirectory() as folder, side_by_side() as engines:
        running, absent = start([*cells.values()], options, Path(folder))
        engines.update(running)
        for name, reason in absent.items():  # some methods are missing in one of upstream's runners
            common.log(f"   {name} does not start: {reason}")
        if OURS in absent:
            raise RuntimeError(absent[OURS])
        for name, engine in engines.items():
            common.check_platform(name.partition(",")[0], engine.platform)
        startup = {name: engine.startup_s for name, engine in engines.items()}
        for number, cell in cells.items():
            found = measure_cell(number, cell, engines, options)
            row = {"device": options.device_name, **asdict(cell), **found, "absent": absent, "startup_s": startup}
            add(str(number), row)
            common.log(f"   {number}: " + ", ".join(describe(row)))


def measure_cell(number: int, cell: Cell, engines: dict[str, Engine], options: argparse.Namespace) -> dict[str, Any]:
    num_turns = Counter[Engine]()
    texts = "mixed" if options.size == DEMO else None

    def ask(engine: Engine) -> dict[str, float]:
        num_turns[engine] += 1
        times: dict[str, float] = engine.call(partial(run_turn, cell, (options.seed, number, num_turns[engine]), texts))
        return times

    take(engines, WARM_UP, ask)
    before = {name: count_drafts(engine) for name, engine in engines.items()}
    turns = take(engines, options.turns, ask)
    counted = {
        name: [now - then for now, then in zip(count_drafts(engines[name]), before[name], strict=True)]
        for name in engines
    }
    figures = [figure for figure in FIGURES if all(figure in times for turn in turns for times in turn.values())]
    seconds = {figure: [{name: turn[name][figure] for name in engines} for turn in turns] for figure in figures}
    others = [name for name in engines if name != OURS]
    return {
        "turns": seconds,
        "median_s": {
            figure: {name: median(turn[name] for turn in seconds[figure]) for name in engines} for figure in figures
        },
        "ratios": {figure: {name: ratio(seconds[figure], OURS, name) for name in others} for figure in figures},
        "acceptance_length": {name: 1 + accepted / drafts for name, (drafts, accepted) in counted.items() if drafts},
    }


def count_drafts(engine: Engine) -> tuple[int, int]:
    return engine.counter(DRAFTS), engine.counter(ACCEPTED)


# ---- showing -------------------------------------------------------------------------------------------


def describe(row: dict[str, Any]) -> list[str]:
    """Return the cell, the device, and the ratios to each of upstream's engines."""
    prompts = row["prompts"]
    sampling = "greedy" if row["temperature"] == 0 else f"T {row['temperature']}, top-p {row['top_p']}"
    lengths = str(prompts[0]) if len({*prompts}) == 1 else f"{min(prompts)} to {max(prompts)}"
    cell = [row["method"], str(row["num_drafts"]), str(len(prompts)), lengths, str(row["tokens"]), sampling]
    ratios = [
        interval(row["ratios"][figure][name]) if name in row["ratios"].get(figure, {}) else ""
        for figure in FIGURES
        for name in environments()
        if name != OURS
    ]
    return [row["device"], *cell, *ratios]


def faster(row: dict[str, Any], figure: str) -> float | None:
    """Return the ratio to the fastest of upstream's engines."""
    return min((value[0] for value in row["ratios"].get(figure, {}).values()), default=None)


def show(rows: dict[str, Any], options: argparse.Namespace) -> None:
    header = ["cell", "device", "method", "k", "requests", "prompts", "outputs", "sampling"]
    header += [f"{figure} / {name}" for figure in FIGURES for name in environments() if name != OURS]
    draw = "fixed cells" if options.fixed else f"seed of the draw {options.seed}"
    common.log(f"\n{draw}, {options.turns} turns each\n")
    ordered = sorted(rows.items(), key=lambda item: int(item[0]))
    common.log(common.markdown(header, [[number, *describe(row)] for number, row in ordered]))
    bounds = f"range of {options.turns} turns, too few for 95 %" if is_range(options.turns) else "95 % interval"
    common.log(f"\nspeedup, median over turns [{bounds}]; to the faster of upstream's engines:")
    for title, plain in (("without drafts", True), ("with drafts", False)):
        for figure in FIGURES:
            values = [faster(row, figure) for row in rows.values() if (row["method"] == PLAIN) == plain]
            if found := [value for value in values if value is not None]:
                common.log(
                    f"  {figure}, {title}: median {median(found):.2f}, least {min(found):.2f}, {len(found)} cells"
                )
    if len(environments()) == 1:
        common.log(f"\nUpstream did not run: it has no platform for {DEVICE} here.")
    common.log(f"\n{common.NOISE_NOTE}")


def measure_all(options: argparse.Namespace) -> None:
    common.warn_if_busy()
    if DEVICE == "cpu":
        preload_openmp()  # also used by upstream's engines
    options.device_name = dummy.name_device()
    settings = {
        name: getattr(options, name)
        for name in (
            *("device", "size", "fixed", "prompt_lengths", "seed", "cells", "methods", "setups", "rate", "turns"),
            "enforce_eager",
        )
    }
    machine = dummy.describe_machine() | {"name": options.device_name, "upstream": [*environments()][1:]}
    settings |= {"limits": asdict(options.limits), "machine": machine}
    kept = drafting.Kept.open(options.json, settings, options.fresh)
    missing = {number: cell for number, cell in enumerate(options.chosen) if str(number) not in kept.cases}
    failures = []
    for setup in dict.fromkeys(cell.setup for cell in missing.values()):
        try:
            measure_setup({i: cell for i, cell in missing.items() if cell.setup == setup}, options, kept.add)
        except RuntimeError as error:
            failures.append(f"{setup[0]}, k = {setup[1]}: {error}")
    show(kept.cases, options)
    if failures:
        raise RuntimeError("; ".join(failures))


def main() -> int:
    options = parse_options()
    # A run that is stopped would otherwise leave its engines running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return drafting.run_whole(lambda: measure_all(options))
