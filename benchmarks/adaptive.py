"""Measure adaptive verification beside fixed numbers of drafts.

python -m benchmarks adaptive --json .bench/adaptive.json

For each method, engines live side by side, each in a process of its own, and take turns: no speculation, the method
with k drafts and with fewer, and adaptive verification with k. A turn is one batch of prompts, past any end token; the
next turn has other prompts. The first turns of a batch size, in which the engine tries each number of drafts, are
reported apart. Ratios are of neighboring turns.
"""

import argparse
from collections import Counter
from typing import Any

from benchmarks.shared import common, drafting
from benchmarks.shared.turns import Engine, Turn, interval, parser_of, ratio, side_by_side, take

METHODS: dict[str, dict[str, Any]] = {
    "ngram": drafting.NGRAM,
    # Without past answers: turns repeat prompts.
    "suffix": {**drafting.SUFFIX, "suffix_decoding_max_cached_requests": 0},
    "draft_model": drafting.SAME_VOCAB,
    "universal_draft": drafting.OTHER_VOCAB,
    "eagle": drafting.EAGLE,
}
PLAIN, ADAPTIVE = "plain", "adaptive"
PROMISED = 0.97


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=8, drafts_help="most drafts per step")
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
    parser.add_argument("--learn", type=int, default=3, metavar="N", help="first turns, reported apart")
    return parser.parse_args()


# ---- measuring -----------------------------------------------------------------------------------------


def measure(method: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    def drafts(num_drafts: int, **more: Any) -> dict[str, Any]:
        return {"speculative_config": {**METHODS[method], "num_speculative_tokens": num_drafts, **more}}

    fixed = {f"k = {number}": drafts(number) for number in (*options.fixed, options.drafts)}
    setups = {PLAIN: {}, **fixed, ADAPTIVE: drafts(options.drafts, enable_adaptive_verification=True)}
    answers = []
    with side_by_side() as engines:
        for name, more in setups.items():
            settings = {"max_model_len": 512, "max_num_seqs": max(options.batches), **more}
            log = f"adaptive-{method}-{name.replace(' ', '')}"
            engines[name] = Engine(log, model, drafting.IN_PROCESS, options.texts, **settings)
        num_turns = Counter[Engine]()
        for batch in options.batches:

            def ask(engine: Engine, batch: int = batch) -> float:
                num_turns[engine] += 1
                return engine.turn(batch, options.tokens, first=num_turns[engine] * batch)

            first = take(engines, options.learn, ask)
            turns = take(engines, options.turns, ask)
            found = compare(turns)
            learned = ratio(first, ADAPTIVE, found["best"])[0] if first else None
            answers.append({"method": method, "batch": batch, "turns": turns, **found, "while_learning": learned})
            common.log(f"{method}, batch {batch}: {interval(found['adaptive'])} of {found['best']}, the best choice")
    return answers


def compare(turns: list[Turn]) -> dict[str, Any]:
    """Return speedups over no speculation, and the ratio of adaptive verification to the best fixed choice."""
    speedups = {name: ratio(turns, name, PLAIN) for name in turns[0]}
    best = max((name for name in speedups if name != ADAPTIVE), key=lambda name: speedups[name][0])
    return {"speedups": speedups, "best": best, "adaptive": ratio(turns, ADAPTIVE, best)}


def measure_all(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    common.warn_if_busy()
    model = options.model or demo_model_path()
    rows = [row for method in options.methods for row in measure(method, model, options)]
    show(rows, options)
    common.write_rows(options, ("drafts", "fixed", "tokens", "learn", "turns", "texts"), rows)


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
    common.log(f"\nspeedup over no speculation, {options.texts} prompts, float32\n\n{common.markdown(header, lines)}")
    common.log(f"\npromise kept: the interval does not lie below {PROMISED}\n\n{common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    return drafting.run_whole(lambda: measure_all(options))
