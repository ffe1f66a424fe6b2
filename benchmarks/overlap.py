"""Speedup of async scheduling on this machine: on and off.

python benchmarks/overlap.py --json .bench/overlap.json

For each method two engines live side by side, each in processes of its own, and take turns; a turn is one batch of
fixed prompts, past any end token. On the CPU, where the device is the host, nothing but vLLM's own bookkeeping can
overlap.
"""

import argparse
import sys
from typing import Any

import common
import speculation_common as shared
from turns import Engine, interval, parser_of, ratio, side_by_side, take

METHODS: dict[str, dict[str, Any] | None] = {
    "no speculation": None,
    "ngram_gpu": {**shared.NGRAM, "method": "ngram_gpu"},
    "draft_model": shared.SAME_VOCAB,
    "universal_draft": shared.OTHER_VOCAB,
    "eagle": shared.EAGLE,
}
ENVIRONMENT = {**common.QUIET, **common.PLATFORMS["ours"]}


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=8)
    parser.set_defaults(batches=[1, 8])
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=["no speculation", "draft_model"],
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}",
    )
    return parser.parse_args()


def measure(method: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": max(options.batches)}
    if (config := METHODS[method]) is not None:
        settings["speculative_config"] = {**config, "num_speculative_tokens": options.drafts}
    rows = []
    with side_by_side() as engines:
        for name, overlap in (("overlapping", True), ("one by one", False)):
            log = f"overlap-{method}-{name}".replace(" ", "-")
            engines[name] = Engine(log, model, ENVIRONMENT, options.texts, async_scheduling=overlap, **settings)
        for batch in options.batches:
            take(engines, 1, lambda engine, batch=batch: engine.turn(batch, 16))
            turns = take(engines, options.turns, lambda engine, batch=batch: engine.turn(batch, options.tokens))
            rows.append(
                {
                    "method": method,
                    "batch": batch,
                    "turns": turns,
                    "ratio": ratio(turns, "overlapping", "one by one"),
                }
            )
            common.log(f"{method}, batch {batch}: {interval(rows[-1]['ratio'])} of the speed of steps one by one")
    return rows


def measure_all(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    common.warn_if_busy()
    model = options.model or demo_model_path()
    rows = [row for method in options.methods for row in measure(method, model, options)]
    lines = [[row["method"], str(row["batch"]), interval(row["ratio"])] for row in rows]
    header = ["method", "batch", "overlapping / one by one"]
    common.log(f"\nk = {options.drafts}, float32\n\n{shared.markdown(header, lines)}")
    common.log(f"\n{common.NOISE_NOTE}")
    common.write_rows(options, ("drafts", "tokens", "turns", "texts"), rows)


def main() -> int:
    options = parse_options()
    return shared.run_whole(lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
