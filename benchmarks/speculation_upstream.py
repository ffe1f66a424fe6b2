"""Drafting with a model on this platform beside upstream's CPU platform: the target's tokenizer, and another one.

python benchmarks/speculation_upstream.py --json .bench/speculation_upstream.json

k = 3, batch 8, 64 tokens past any end token, greedy, float32. Each measurement is an engine process of its own, never
two at once: ours, upstream's, ours, ...; upstream's runs eagerly.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import common
import speculation_common as shared
from upstream import PLATFORMS, QUIET, check_platform

from vllm_gaudi_spec.demo_model import demo_model_path

NUM_DRAFTS = 3
WANTED = 1.2
Samples = dict[str, dict[str, list[dict[str, float]]]]
WARMUP_TOKENS = 16
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": shared.SAME_VOCAB,
    # Spelled as upstream knows it; here it is universal_draft.
    "heterogeneous": {**shared.OTHER_VOCAB, "method": "draft_model", "use_heterogeneous_vocab": True},
}


def parse_options() -> argparse.Namespace:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="engine processes per platform and method")
    parser.add_argument("--runs", type=int, default=3, help="measured runs in each process")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


# ---- in the child processes ----------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, float]:
    platform, method = options.part.split("/")
    check_platform(platform)
    prompts = shared.prompt_sets()["openings"]
    from spec_measure import acceptance, draft_counts  # the full tests' folder is known by now

    with shared.engine(
        demo_model_path(),
        {**METHODS[method], "num_speculative_tokens": NUM_DRAFTS},
        enforce_eager=platform == "upstream",
        max_model_len=512,
        max_num_seqs=len(prompts),
    ) as llm:
        llm.generate(prompts, shared.sampling(0.0, WARMUP_TOKENS, 0), use_tqdm=False)
        before, seconds = draft_counts(llm), []
        for _ in range(options.runs):
            started = time.perf_counter()
            llm.generate(prompts, shared.sampling(0.0, options.tokens, 0), use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        counts = {name: count - before[name] for name, count in draft_counts(llm).items()}
    length = acceptance(counts, NUM_DRAFTS)["mean_accepted_length"]
    return {"tok_s": len(prompts) * options.tokens / median(seconds), "mean_accepted_length": length}


# ---- in the parent -------------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> None:
    common.warn_if_busy()
    samples: Samples = {method: {platform: [] for platform in PLATFORMS} for method in options.methods}
    for repeat in range(options.repeats):
        for method in options.methods:
            for platform, environment in PLATFORMS.items():
                common.say(f"[{repeat + 1}/{options.repeats}] {method}, {platform} ...")
                sample = common.run_part(
                    Path(__file__),
                    ["--part", f"{platform}/{method}", *shared.cli(options, "runs", "tokens")],
                    log=f"speculation_upstream-{method}-{platform}-{repeat + 1}",
                    environment={**QUIET, **environment},
                    seconds=900,
                )
                samples[method][platform].append(sample)
                common.say(f"      {sample['tok_s']:.1f} tokens/s, {sample['mean_accepted_length']:.2f} tokens a step")
    rows = [row_of(method, samples[method]) for method in options.methods]
    show(rows, options)
    common.write_json(options.json, {"rows": rows, "samples": samples, "machine": common.describe_machine()})


def row_of(method: str, samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method}
    for name in ("mean_accepted_length", "tok_s"):
        row[name] = {platform: median(sample[name] for sample in samples[platform]) for platform in PLATFORMS}
        row[name]["ratio"] = row[name]["ours"] / row[name]["upstream"]
    return row


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    header = ["method", *(f"{what}, {side}" for what in ("length", "tokens/s") for side in (*PLATFORMS, "ratio"))]
    lines = []
    for row in rows:
        lengths, speeds = row["mean_accepted_length"], row["tok_s"]
        cells = [
            *(f"{value:.2f}" for value in lengths.values()),
            *(f"{speeds[platform]:.1f}" for platform in PLATFORMS),
        ]
        lines.append([row["method"], *cells, f"{speeds['ratio']:.2f}"])
    common.say(
        f"\nk = {NUM_DRAFTS}, batch 8, {options.tokens} tokens, float32; medians of {options.repeats} processes\n"
    )
    common.say(shared.markdown(header, lines))
    common.say(f"\nlength: tokens per verify step. tokens/s wanted: {WANTED} x upstream's. {common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    return shared.run_main(options, lambda: measure(options), lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
