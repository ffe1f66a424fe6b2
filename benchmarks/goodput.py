"""Check that drafting with the goodput rule is never much slower than not drafting.

python -m benchmarks goodput --json .bench/goodput.json

For each method three engines live side by side, each in a process of its own, and take turns: no speculation, the
method alone, and the method with the rule. A turn is one batch of fixed prompts, past any end token. The
first turns of a batch size are those in which the rule learns; they are reported apart. Ratios are of neighboring
turns.
"""

import argparse
from typing import Any

from benchmarks.shared import common, drafting
from benchmarks.shared.turns import Engine, interval, parser_of, ratio, side_by_side, take

METHODS: dict[str, dict[str, Any]] = {
    "ngram": drafting.NGRAM,
    # Without past answers: every turn asks the same.
    "suffix": {**drafting.SUFFIX, "suffix_decoding_max_cached_requests": 0},
    "draft_model": drafting.SAME_VOCAB,
    "universal_draft": drafting.OTHER_VOCAB,
    "eagle": drafting.EAGLE,
}
SKIPPED_STEPS = "gaudi_spec:skipped_steps"
RULE = {"additional_config": {"gaudi_spec": {"goodput": True}}}
PROMISED = 0.97


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=8)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}",
    )
    parser.add_argument(
        "--learn", type=int, default=3, metavar="N", help="turns in which the rule learns, reported apart"
    )
    return parser.parse_args()


# ---- measuring -----------------------------------------------------------------------------------------


def measure(method: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    config = {**METHODS[method], "num_speculative_tokens": options.drafts}
    setups: dict[str, dict[str, Any]] = {
        "plain": {},
        "alone": {"speculative_config": config},
        "ruled": {"speculative_config": config, **RULE},
    }
    answers = []
    with side_by_side() as engines:
        for name, more in setups.items():
            settings = {"max_model_len": 512, "max_num_seqs": max(options.batches), **more}
            engines[name] = Engine(f"goodput-{method}-{name}", model, drafting.IN_PROCESS, options.texts, **settings)
        for batch in options.batches:

            def ask(engine: Engine, batch: int = batch) -> float:
                return engine.turn(batch, options.tokens)

            first = take(engines, options.learn, ask)
            skipped_before = engines["ruled"].counter(SKIPPED_STEPS)
            turns = take(engines, options.turns, ask)
            answers.append(
                {
                    "method": method,
                    "batch": batch,
                    "turns": turns,
                    "alone": ratio(turns, "alone", "plain"),
                    "ruled": ratio(turns, "ruled", "plain"),
                    "while_learning": ratio(first, "ruled", "plain")[0] if first else None,
                    "spared_steps": engines["ruled"].counter(SKIPPED_STEPS) - skipped_before,
                }
            )
            common.log(f"{method}, batch {batch}: {interval(answers[-1]['ruled'])} of no speculation with the rule")
    return answers


def measure_all(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    common.warn_if_busy()
    model = options.model or demo_model_path()
    rows = [row for method in options.methods for row in measure(method, model, options)]
    show(rows, options)
    common.write_rows(options, ("drafts", "tokens", "learn", "turns", "texts"), rows)


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    lines = [
        [
            row["method"],
            str(row["batch"]),
            interval(row["alone"]),
            interval(row["ruled"]),
            "" if row["while_learning"] is None else f"{row['while_learning']:.2f}",
            str(row["spared_steps"]),
            "yes" if row["ruled"][2] >= PROMISED else "NO",
        ]
        for row in rows
    ]
    header = [
        "method",
        "batch",
        "drafting always",
        "with the rule",
        "while it learned",
        "skipped steps",
        "promise kept",
    ]
    common.log(f"\nspeedup over no speculation, k = {options.drafts}, float32\n\n{common.markdown(header, lines)}")
    common.log(f"\npromise kept: the interval does not lie below {PROMISED}\n\n{common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    return drafting.run_whole(lambda: measure_all(options))
