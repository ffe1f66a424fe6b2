"""Compare adaptive verification with fixed numbers of drafts.

python -m benchmarks adaptive --json .bench/adaptive.json

For each method, several engines run side by side, each in its own process, and take turns: one without speculation, one
with k drafts, one with fewer drafts, and one with adaptive verification up to k. In a turn, an engine answers one batch
of prompts and generates past any end token; the next turn uses other prompts. With --rounds N, a turn has N times as
many prompts, and a request starts whenever another one ends. The first turns for each batch size, in which the engine
learns, are reported separately. Ratios compare neighboring turns.

With --size, the target and an EAGLE head have that size and random weights, and drafts are accepted at the given rates:

VGS_DEVICE=cuda python -m benchmarks adaptive --size 8b --rates 0.3 0.8 --json .bench/adaptive.json
"""

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared import common, drafting, dummy
from benchmarks.shared.turns import Engine, Turn, interval, parser_of, ratio, side_by_side, take

METHODS: dict[str, dict[str, Any]] = {
    "ngram": drafting.NGRAM,
    # Do not use past answers, because prompts are repeated between turns.
    "suffix": {**drafting.SUFFIX, "suffix_decoding_max_cached_requests": 0},
    "draft_model": drafting.SAME_VOCAB,
    "universal_draft": drafting.OTHER_VOCAB,
    "eagle": drafting.EAGLE,
}
PLAIN, ADAPTIVE = "plain", "adaptive"
PROMISED = 0.97
PROMPT = 128
"""Number of tokens in a prompt, if weights are random."""


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=9, drafts_help="most drafts per step")
    parser.set_defaults(texts="mixed", drafts=7)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=["draft_model", "eagle"],
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}",
    )
    parser.add_argument(
        "--fixed", type=int, nargs="+", default=[1, 3], metavar="K", help="fixed numbers of drafts besides the most"
    )
    parser.add_argument("--size", choices=dummy.SIZES, help="shape of a target with random weights")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.3, 0.8],
        metavar="R",
        help="acceptance rates of drafts, with --size",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="requests of a turn per request that runs at a time; with more than 1, the next starts when one ends",
    )
    parser.add_argument("--learn", type=int, default=3, metavar="N", help="first turns, reported apart")
    return parser.parse_args()


# ---- measuring -----------------------------------------------------------------------------------------


def list_setups(drafter: dict[str, Any], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    def drafts(num_drafts: int, **more: Any) -> dict[str, Any]:
        config = {**drafter, "num_speculative_tokens": num_drafts, **more}
        if "synthetic_acceptance_rates" in config:
            config["synthetic_acceptance_rates"] = config["synthetic_acceptance_rates"][:num_drafts]
        return {"speculative_config": config}

    fixed = {f"k = {number}": drafts(number) for number in (*options.fixed, options.drafts)}
    return {PLAIN: {}, **fixed, ADAPTIVE: drafts(options.drafts, enable_adaptive_verification=True)}


def start_demo(method: str, model: str, options: argparse.Namespace, name: str, setup: dict[str, Any]) -> Engine:
    settings = {"max_model_len": 512, "max_num_seqs": max(options.batches), **setup}
    log = f"adaptive-{method}-{name.replace(' ', '')}"
    return Engine(log, model, drafting.IN_PROCESS, options.texts, **settings)


def start_dummy(folder: Path, options: argparse.Namespace, name: str, setup: dict[str, Any]) -> Engine:
    rows, dtype = max(options.batches), dummy.DTYPES[options.size]
    length = PROMPT + 2 * options.tokens + options.drafts + 1
    kv_bytes = 1.1 * dummy.kv_bytes(dummy.SIZES[options.size], dtype) * (rows + 1) * (length + 128)
    return Engine(
        f"adaptive-{options.size}-{name.replace(' ', '')}",
        dummy.write_model(folder / name, options.size),
        drafting.IN_PROCESS,
        PROMPT,
        load_format="dummy",
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=max(2048, rows * (1 + options.drafts)),
        kv_cache_memory_bytes=int(kv_bytes),
        additional_config={"gaudi_spec": {"batch_buckets": sorted(options.batches)}},
        **setup,
    )


def measure(
    what: dict[str, Any],
    setups: dict[str, dict[str, Any]],
    start: Callable[[str, dict[str, Any]], Engine],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row for each batch size. `what` describes the rows."""
    answers = []
    others = {name: setup for name, setup in setups.items() if name != ADAPTIVE}
    with side_by_side() as engines:
        with ThreadPoolExecutor(max_workers=None if dummy.on_accelerator() else 1) as pool:
            engines.update(zip(others, pool.map(start, others, others.values()), strict=True))
        engines[ADAPTIVE] = start(ADAPTIVE, setups[ADAPTIVE])  # started alone, because its warm-up measures step times
        num_turns = Counter[Engine]()
        for batch in options.batches:

            def ask(engine: Engine, batch: int = batch) -> float:
                num_turns[engine] += 1
                first = num_turns[engine] * batch * options.rounds
                return engine.turn(batch, options.tokens, first, options.rounds)

            first = take(engines, options.learn, ask)
            turns = take(engines, options.turns, ask)
            found = compare(turns)
            learned = ratio(first, ADAPTIVE, found["best"])[0] if first else None
            answers.append({**what, "batch": batch, "turns": turns, **found, "while_learning": learned})
            common.log(f"{what}, batch {batch}: {interval(found['adaptive'])} of {found['best']}, the best choice")
    return answers


def compare(turns: list[Turn]) -> dict[str, Any]:
    """s|Return the speedups|Return speedups| s|the ratio of adaptive|the ratio of adaptive|"""
    speedups = {name: ratio(turns, name, PLAIN) for name in turns[0]}
    best = max((name for name in speedups if name != ADAPTIVE), key=lambda name: speedups[name][0])
    return {"speedups": speedups, "best": best, "adaptive": ratio(turns, ADAPTIVE, best)}


def measure_all(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    os.environ.setdefault("VGS_DEVICE", "cpu")
    common.warn_if_busy()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.size:
            head = dict(
                method="eagle", model=dummy.write_model(Path(folder) / "head", options.size, num_hidden_layers=1)
            )
            for rate in options.rates:
                accepted = [rate**position for position in range(1, options.drafts + 1)]
                drafter = head | dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=accepted)
                start = partial(start_dummy, Path(folder), options)
                what = {"method": f"eagle, {options.size}, acceptance {rate}"}
                rows += measure(what, list_setups(drafter, options), start, options)
        else:
            model = options.model or demo_model_path()
            for method in options.methods:
                start = partial(start_demo, method, model, options)
                rows += measure({"method": method}, list_setups(METHODS[method], options), start, options)
    show(rows, options)
    settings = ("size", "drafts", "fixed", "tokens", "rounds", "learn", "turns", "texts")
    common.write_rows(options, settings, rows, machine=dummy.describe_machine())


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = [name for name in rows[0]["speedups"] if name != PLAIN]
    lines = [
        [
            row["method"],
            str(row["batch"]),
            *(f"{row['speedups'][name][0]:.2f}" for name in names),
            row["best"],
            interval(row["adaptive"]),
            "" if row["while_learning"] is None else f"{row['while_learning']:.2f}",
            "yes" if row["adaptive"][2] >= PROMISED else "NO",
        ]
        for row in rows
    ]
    header = ["method", "batch", *names, "best choice", "adaptive / best", "first turns", "promise kept"]
    prompts = "random" if options.size else options.texts
    common.log(f"\nspeedup over no speculation, {prompts} prompts\n\n{common.markdown(header, lines)}")
    common.log(f"\npromise kept: the interval does not lie below {PROMISED}\n\n{common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    return drafting.run_whole(lambda: measure_all(options))
