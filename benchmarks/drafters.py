"""Microseconds that the drafters on the host take for one request with a long context.

python benchmarks/drafters.py --json .bench/drafters.json

Texts that are worst for n-grams (all tokens equal, two tokens alternating, few different ones), a loop, and tokens
drawn from a whole vocabulary, which never match. Suffix decoding is timed beside past responses made of the same text.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import common
import numpy as np

from vllm_gaudi_spec.drafting.ngram import NgramProposer
from vllm_gaudi_spec.drafting.suffix import SuffixProposer
from vllm_gaudi_spec.records import Context
from vllm_gaudi_spec.tools.io.command_line import Parser

STEPS = 200


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="tokens of the request")
    common.add_num_drafts(parser, "drafts", 8)
    parser.add_argument("--ngram", type=int, nargs=2, default=[2, 5], metavar=("MIN", "MAX"), help="lengths of matches")
    parser.add_argument(
        "--responses", type=int, default=200, metavar="N", help="past responses in the suffix cache, 500 tokens each"
    )
    common.add_json(parser)
    return parser.parse_args()


def texts(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {
        "all equal": np.zeros(length),
        "alternating": np.arange(length) % 2,
        "4 tokens": rng.integers(0, 4, length),
        "loop of 200": np.resize(rng.integers(0, 32000, 200), length),
        "32000 tokens": rng.integers(0, 32000, length),
    }
    return {name: text.astype(np.int32) for name, text in made.items()}


def microseconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def steps(text: np.ndarray, drafts: int) -> Iterator[list[Context]]:
    """The request grows to the whole text, two tokens a step."""
    for left in range(2 * STEPS, -1, -2):
        yield [
            Context(req_id="request", tokens_np=text[: text.size - left], num_prompt=text.size // 2, max_drafts=drafts)
        ]


def measure_ngram(text: np.ndarray, options: argparse.Namespace) -> dict[str, float]:
    proposer = NgramProposer(*options.ngram)
    return {"step_us": median(microseconds(lambda c=c: proposer.propose(c)) for c in steps(text, options.drafts))}


def measure_suffix(text: np.ndarray, options: argparse.Namespace) -> dict[str, float]:
    proposer = SuffixProposer(24, 10_000, 1.0, 0.1)
    for number in range(options.responses):
        response = np.roll(text, 37 * number)[:500]
        proposer.propose([Context(req_id=str(number), tokens_np=response, num_prompt=1, max_drafts=1)])
        proposer.forget([str(number)])
    start, *rest = (microseconds(lambda c=c: proposer.propose(c)) for c in steps(text, options.drafts))
    return {"start_us": start, "step_us": median(rest)}


def main() -> None:
    options = parse_options()
    common.warn_if_busy()
    report: dict[str, Any] = {"context": options.context, "drafts": options.drafts, **common.describe_machine()}
    rows = []
    for name, text in texts(options.context).items():
        ngram, suffix = measure_ngram(text, options), measure_suffix(text, options)
        report[name] = {"ngram": ngram, "suffix": suffix}
        rows.append([name, *(f"{value:.0f}" for value in (ngram["step_us"], suffix["start_us"], suffix["step_us"]))])
    common.log(common.table(["text", "ngram step us", "suffix start us", "suffix step us"], rows))
    common.log(common.NOISE_NOTE)
    common.write_json(options.json, report)


if __name__ == "__main__":
    main()
