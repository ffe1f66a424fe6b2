"""A round of drafts on a GPU beside reading the drafter's weights as often: device ms of the captured graph, by B.

VGS_DEVICE=cuda python benchmarks/draft_round.py --json .bench/draft_round.json
VGS_DEVICE=cuda python benchmarks/draft_round.py --beside ../before      # another checkout of the package, in turns

Random weights, a draft model of k drafts, prompts of 512. A turn is an engine in a process of its own, of which the
graph that a step replays is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import common
import dummy
import speculation_common as shared
import torch

SETTINGS = ("size", "batches", "k", "context", "repeats")


def parse_options() -> argparse.Namespace:
    parser = shared.parser_of(__doc__)
    parser.add_argument(
        "--size", choices=dummy.DRAFTERS, default="8b", help="size of the target; the drafter's follows"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], metavar="B", help="batch sizes")
    parser.add_argument("--k", type=int, default=4, metavar="K", help="drafts of a round")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="rounds that are timed in a turn")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="engines of each checkout")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout, in turns with this one")
    common.add_json(parser)
    return parser.parse_args()


# ---- in the child processes ----------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a round by batch size, and of reading the weights k times."""
    drafter, most = dummy.DRAFTERS[options.size], max(options.batches)
    length = options.context + 64
    per_token = sum(dummy.kv_bytes(dummy.SIZES[size], torch.bfloat16) for size in (options.size, drafter))
    speculation = {"method": "draft_model", "num_speculative_tokens": options.k}
    rounds: dict[str, float] = {}
    with (
        dummy.engine(
            options.size,
            speculation,
            drafter,
            dtype="bfloat16",
            max_model_len=length,
            max_num_seqs=most,
            kv_cache_memory_bytes=int(1.1 * per_token * (most + 1) * (length + 128)),
            gaudi_spec={"batch_buckets": options.batches, "warmup_tokens": 0},
        ) as llm,
        torch.inference_mode(),
    ):
        dummy.fill_kv(llm)
        draft = dummy.runner_of(llm).drafting
        prompts = shared.random_prompts(options.context, most)
        for batch in options.batches:
            with timed_round(draft, batch, options.repeats) as seconds:
                shared.ask(llm, prompts[:batch], 0.0, 8 * (1 + options.k), options.k)
            rounds[str(batch)] = seconds[0]
        return {"rounds": rounds, "read": read_seconds(drafter, options.k, options.repeats)}


@contextmanager
def timed_round(drafting: Any, batch: int, repeats: int) -> Iterator[list[float]]:
    """One round of so many requests is run over and over, where it stands: it writes the same KV and drafts again."""
    seconds: list[float] = []
    original, earlier = drafting._draft_rows, count()

    def draft(*args: Any) -> None:
        original(*args)
        if len(args[0]) == batch and next(earlier) == 3:
            seconds.append(dummy.seconds_of(lambda: original(*args), lambda: None, repeats))

    drafting._draft_rows = draft
    yield seconds
    drafting._draft_rows = original


def read_seconds(drafter: str, times: int, repeats: int) -> float:
    """Of reading as many bytes as the drafter's weights have, so often."""
    num_bytes = dummy.weight_bytes(dummy.SIZES[drafter], torch.bfloat16)
    weights = torch.ones(num_bytes // 4, device="cuda" if dummy.on_accelerator() else "cpu")
    return times * dummy.seconds_of(weights.amax, lambda: None, repeats)


# ---- in the parent -------------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> None:
    common.warn_if_busy()
    sides = [("here", common.ROOT)] + [("beside", options.beside)] * (options.beside is not None)
    turns: dict[str, list[Any]] = {name: [] for name, _ in sides}
    for number in range(options.turns):
        for name, checkout in sides[:: -1 if number % 2 else 1]:
            started = time.perf_counter()
            environment = {
                **shared.IN_PROCESS,
                "VGS_DEVICE": os.environ["VGS_DEVICE"],
                "PYTHONPATH": f"{checkout.resolve()}:{os.environ.get('PYTHONPATH', '')}",
            }
            words = ["--part", name, *shared.cli(options, *SETTINGS)]
            log_name = f"draft_round-{name}"
            turns[name].append(
                common.run_part(Path(__file__), words, log_name=log_name, environment=environment, seconds=300)
            )
            common.log(f"{name}, turn {number + 1}: {time.perf_counter() - started:.0f} s {turns[name][-1]}")
    show(options, turns)
    common.write_rows(options, (*SETTINGS, "turns"), [turns], dummy.describe_machine())


def show(options: argparse.Namespace, turns: dict[str, list[Any]]) -> None:
    read = median(turn["read"] for some in turns.values() for turn in some)
    lines = []
    for batch in options.batches:
        cells = [str(batch)]
        for some in turns.values():
            seconds = [turn["rounds"][str(batch)] for turn in some]
            spread = f"{1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f}"
            cells.append(f"{1e3 * median(seconds):.2f} ({spread}), {median(seconds) / read:.2f}x")
        lines.append(cells)
    header = ["B", *(f"ms of a round, {name}" for name in turns)]
    note = f"reading the drafter's weights {options.k} times: {1e3 * read:.2f} ms"
    common.log(f"\n{shared.markdown(header, lines)}\n\n{note}")


def main() -> int:
    options = parse_options()
    return shared.run_main(options, lambda: measure(options), lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
