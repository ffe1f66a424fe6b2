"""Compare a block drafter's drafting with the k steps that an EAGLE head needs for the same number of drafts.

python -m benchmarks rounds --json .bench/rounds.json
VGS_DEVICE=cuda python -m benchmarks rounds --size 8b --json .bench/rounds.json

Drafting is everything between verification and report: the drafter reads newly verified tokens and drafts k more. Each
drafter has an engine in its own process, and the engines take turns. On a GPU, only the device's own time is measured.
Models have the given size and random weights. DFlash has five layers and reads up to five of the target's. Each head
has one layer: EAGLE's uses the target's vocabulary, and EAGLE-3's has up to 32,000 tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm import SamplingParams

from benchmarks.shared import common, drafting, dummy
from benchmarks.shared.turns import Engine, interval, ratio, side_by_side, take
from vllm_gaudi_spec.tools.io.command_line import Parser

METHODS = ("eagle", "eagle3", "dflash")
BLOCK = "dflash"
SIZES = ("8b", "1.5b", "small")
NUM_BLOCK_LAYERS = NUM_READ = 5
"""The maximum number of layers in published drafters for 8B targets, and of target layers that these drafters read."""
REDUCED_VOCAB = 32000
FIRST = 3
"""Number of drafting steps at the start of a turn that are not counted, because they follow prompts or because some
rows are still empty."""


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the target")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], metavar="B", help="batch sizes")
    parser.add_argument("--prompt", type=int, default=256, metavar="N", help="tokens of prompts")
    common.add_num_drafts(parser, "drafts", 7)
    common.add_output_len(parser, 48)
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="measured turns of each cell")
    common.add_json(parser)
    return parser.parse_args()


# ---- models --------------------------------------------------------------------------------------------


def write_drafter(method: str, size: str, folder: Path) -> str:
    shape = dummy.SIZES[size]
    layers = shape["num_hidden_layers"]
    if method == "eagle":
        return dummy.write_model(folder / method, size, num_hidden_layers=1)
    if method == "eagle3":
        few = min(REDUCED_VOCAB, shape["vocab_size"])
        read = [1, layers // 2, layers - 2]
        changes: dict[str, Any] = dict(
            architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=few, eagle_aux_hidden_state_layer_ids=read
        )
        return dummy.write_model(folder / method, size, num_hidden_layers=1, **changes)
    read = sorted({1 + index * (layers - 3) // (NUM_READ - 1) for index in range(NUM_READ)})
    return dummy.write_model(
        folder / method,
        size,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        num_hidden_layers=NUM_BLOCK_LAYERS,
        attention_bias=False,
        block_size=8,
        dflash_config=dict(mask_token_id=0, target_layer_ids=read),
    )


def start(method: str, options: argparse.Namespace, folder: Path) -> Engine:
    rows, length = max(options.batches), options.prompt + options.tokens + options.drafts + 1
    step_tokens = max(options.prompt, rows * (1 + options.drafts))
    dtype = dummy.DTYPES[options.size]
    per_token = 2 * dummy.kv_bytes(dummy.SIZES[options.size], dtype)
    return Engine(
        f"rounds-{method}",
        dummy.write_model(folder / f"target-{method}", options.size),
        common.QUIET | {"VLLM_PLUGINS": "gaudi_spec", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        options.prompt,
        load_format="dummy",
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=step_tokens,
        kv_cache_memory_bytes=int(per_token * (rows + 1) * (length + 256)),
        gpu_memory_utilization=0.25,
        additional_config={
            "gaudi_spec": {
                "batch_buckets": sorted(options.batches),
                "prefill_buckets": [min(length, step_tokens)],
                "prefill_rows": [1],
            }
        },
        speculative_config=dict(
            method=method,
            model=write_drafter(method, options.size, folder),
            num_speculative_tokens=options.drafts,
        ),
    )


# ---- measuring -----------------------------------------------------------------------------------------


def time_rounds(batch: int, prompt: int, tokens: int, llm: Any) -> float:
    """Return the median seconds that drafting takes with the given number of rows."""
    proposer = dummy.runner_of(llm).drafting
    propose, marks = proposer.propose, []

    def timed(*args: Any, **named: Any) -> Any:
        begin = _mark()
        result = propose(*args, **named)
        marks.append((begin, _mark()))
        return result

    proposer.propose = timed
    try:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in drafting.random_prompts(prompt, batch)]
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        del proposer.propose
    if dummy.on_accelerator():
        torch.cuda.synchronize()
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in marks]
    else:
        seconds = [end - begin for begin, end in marks]
    counted = seconds[FIRST:-FIRST]
    if not counted:
        raise RuntimeError(f"only {len(seconds)} rounds: raise --output-len")
    return median(counted)


def _mark() -> Any:
    if not dummy.on_accelerator():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure(engines: dict[str, Engine], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    work = partial(time_rounds, batch, options.prompt, options.tokens)
    for engine in engines.values():
        engine.call(work)
    turns = take(engines, options.turns, lambda engine: float(engine.call(work)))
    row = {
        "batch": batch,
        "round_ms": {name: 1e3 * median(turn[name] for turn in turns) for name in engines},
        "cost": {name: ratio(turns, name, BLOCK) for name in engines if name != BLOCK and BLOCK in engines},
    }
    common.log(f"   B = {batch}: {row['round_ms']}")
    return row


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = list(rows[0]["round_ms"])
    header = ["B", *(f"{name}, ms" for name in names), *(f"{BLOCK} / {name}" for name in rows[0]["cost"])]
    lines = [
        [
            str(row["batch"]),
            *(f"{row['round_ms'][name]:.3f}" for name in names),
            *(interval(value) for value in row["cost"].values()),
        ]
        for row in rows
    ]
    common.log(f"\nOne round, k = {options.drafts}, prompts of {options.prompt}\n\n{common.markdown(header, lines)}")


def measure_all(options: argparse.Namespace) -> None:
    os.environ.setdefault("VGS_DEVICE", "cpu")
    with tempfile.TemporaryDirectory() as folder, side_by_side() as engines:
        with ThreadPoolExecutor() as pool:
            started = pool.map(lambda method: start(method, options, Path(folder)), options.methods)
            engines.update(zip(options.methods, started, strict=True))
        for name, engine in engines.items():
            common.check_platform("ours", engine.platform)
            common.log(f"   {name}: started in {engine.startup_s:.0f} s")
        rows = [measure(engines, batch, options) for batch in options.batches]
    show(rows, options)
    settings = ("size", "drafts", "prompt", "tokens", "turns")
    common.write_rows(options, settings, rows, machine=dummy.describe_machine())


def main() -> int:
    options = parse_options()
    return drafting.run_whole(lambda: measure_all(options))
