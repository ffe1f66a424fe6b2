"""Compare this platform with upstream's CPU platform: plain decoding, and methods that both have.

python -m benchmarks upstream --json .bench/upstream.json

For each method both engines live side by side, each in processes of its own, and take turns. A turn is one batch of the
fixed prompts, greedy, float32, past any end token; upstream's engine runs eagerly. For EAGLE-3, Medusa and MTP there
are no weights of the demo model.
"""

import argparse
from statistics import median
from typing import Any

from benchmarks.shared import common, drafting
from benchmarks.shared.common import PLATFORMS, QUIET
from benchmarks.shared.turns import Engine, interval, parser_of, ratio, side_by_side, take

# By upstream's names. Its suffix drafter needs a package besides; ngram_gpu needs Triton there.
METHODS: dict[str, dict[str, Any] | None] = {
    "no speculation": None,
    "ngram": drafting.NGRAM,
    "draft_model": drafting.SAME_VOCAB,
    "heterogeneous": {**drafting.OTHER_VOCAB, "method": "draft_model", "use_heterogeneous_vocab": True},
    "eagle": drafting.EAGLE,
}
WANTED = 1.2
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=6)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}",
    )
    return parser.parse_args()


# ---- measuring -----------------------------------------------------------------------------------------


def measure(method: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    config = METHODS[method]
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": max(options.batches)}
    if config is not None:
        settings["speculative_config"] = {**config, "num_speculative_tokens": options.drafts}
    with side_by_side() as engines:
        for platform, environment in PLATFORMS.items():
            common.log(f"{method}: starting {platform} ...")
            eager = platform == "upstream"
            log = f"upstream-{method.replace(' ', '-')}-{platform}"
            engines[platform] = Engine(
                log, model, {**QUIET, **environment}, options.texts, enforce_eager=eager, **settings
            )
            common.check_platform(platform, engines[platform].platform)
        batches = [measure_batch(engines, batch, options) for batch in options.batches]
        lengths = {name: tokens_a_step(engine) for name, engine in engines.items()}
        startup = {name: engine.startup_s for name, engine in engines.items()}
    return {"method": method, "batches": batches, "tokens_a_step": lengths, "startup_s": startup}


def measure_batch(engines: dict[str, Engine], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    take(engines, 1, lambda engine: engine.turn(batch, 16))
    turns = take(engines, options.turns, lambda engine: engine.turn(batch, options.tokens))
    # The first token is the prompt's; what the others take is decode steps alone.
    first = take(engines, 2, lambda engine: engine.turn(batch, 1))
    decoding = {
        name: (median(turn[name] for turn in turns) - median(turn[name] for turn in first)) / (options.tokens - 1)
        for name in engines
    }
    answer = {
        "batch": batch,
        "turns": turns,
        "tok_s": {name: batch * options.tokens / median(turn[name] for turn in turns) for name in engines},
        "ratio": ratio(turns, "ours", "upstream"),
        "seconds_a_token": decoding,
    }
    common.log(f"      batch {batch}: {interval(answer['ratio'])} of upstream's speed")
    return answer


def tokens_a_step(engine: Engine) -> float | None:
    """Return the mean acceptance length of steps with drafts; None if there was none."""
    drafts = engine.counter(DRAFTS)
    return 1 + engine.counter(ACCEPTED) / drafts if drafts else None


# ---- showing -------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    lines = []
    for row in rows:
        lengths = [f"{value:.2f}" if value else "" for value in row["tokens_a_step"].values()]
        for cell in row["batches"]:
            speeds = [f"{cell['tok_s'][platform]:.1f}" for platform in PLATFORMS]
            meets_goal = "yes" if cell["ratio"][0] >= WANTED else "NO"
            lines.append([row["method"], str(cell["batch"]), *lengths, *speeds, interval(cell["ratio"]), meets_goal])
    header = ["method", "batch", "tokens a step, ours", "upstream's", "tokens/s, ours", "upstream's", "ratio"]
    common.log(f"\nk = {options.drafts}, {options.tokens} tokens a prompt, float32, {options.turns} turns each\n")
    common.log(common.markdown([*header, f">= {WANTED}"], lines))
    for row in rows:
        if row["method"] == "no speculation" and row["batches"][0]["batch"] == 1:
            steps = {name: 1e3 * value for name, value in row["batches"][0]["seconds_a_token"].items()}
            common.log(
                f"\nplain decode step, batch 1: ours {steps['ours']:.1f} ms, upstream {steps['upstream']:.1f} ms"
            )
            startup = row["startup_s"]
            common.log(f"start-up: ours {startup['ours']:.1f} s, upstream {startup['upstream']:.1f} s")
    common.log(f"\n{common.NOISE_NOTE}")


def measure_all(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    common.warn_if_busy()
    model = options.model or demo_model_path()
    rows = [measure(method, model, options) for method in options.methods]
    show(rows, options)
    common.write_rows(options, ("drafts", "tokens", "turns", "texts"), rows)


def main() -> int:
    options = parse_options()
    return drafting.run_whole(lambda: measure_all(options))
