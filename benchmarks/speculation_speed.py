"""The speedup of drafting at batch 1, k = 1 to 5, and its bound with steps as they are.

python benchmarks/speculation_speed.py --json .bench/speculation_speed.json

Each k is an engine of its own, since a step that verifies is k + 1 tokens wide. In it, requests with drafts and without
(which ask for 0) take turns, so that a slow minute of the machine meets both.

The bound is accepted length x plain step / (verify + draft), medians of this engine's own decode steps, taken inside
the runner: a step is the forward, the verification and its report; "draft" is what the drafter took of it, "verify" the
rest. A drafter without weights in an engine beside this one could time the verify step too, but at another moment of a
noisy machine, its drafts made elsewhere. What is missing to the bound is the prompt, which is counted in
the tokens/s and is no decode step, and what vLLM does between two steps.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
import speculation_common as shared

from vllm_gaudi_spec.tools.demo_model import demo_model_path

METHODS = {"draft_model": shared.SAME_VOCAB, "universal_draft": shared.OTHER_VOCAB}
WARMUP_TOKENS = 16
SETTINGS = ("tokens", "texts", "prompts", "temperature", "cpu_weights")


def parse_options() -> argparse.Namespace:
    parser = shared.parser_of(__doc__)
    common.add_num_drafts(parser, "drafts", [1, 2, 3, 4, 5])
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}",
    )
    common.add_output_len(parser, 128)
    parser.add_argument("--texts", choices=shared.TEXTS, default="openings", help="which set of prompts")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="the first N prompts of the set")
    parser.add_argument(
        "--cpu-weights", metavar="FORMAT", help="the option cpu_weights of additional_config.gaudi_spec"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    common.add_json(parser)
    return parser.parse_args()


# ---- in the child processes ----------------------------------------------------------------------------


class Clock:
    """Times the steps of a runner, and the drafter in them."""

    def __init__(self, runner: Any) -> None:
        self.steps: list[dict[str, float]] = []
        self._draft = self._now = 0.0
        for name in ("follow", "propose", "propose_on_host"):
            setattr(runner.drafting, name, self._drafting(getattr(runner.drafting, name)))
        runner.execute_model, runner.sample_tokens = self._first(runner.execute_model), self._last(runner.sample_tokens)

    def take(self) -> list[dict[str, float]]:
        """The decode steps since the last call."""
        taken, self.steps = [step for step in self.steps if step["decodes"]], []
        return taken

    def _drafting(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            answer = work(*args)
            self._draft += time.perf_counter() - started
            return answer

        return timed

    def _first(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(scheduled: Any) -> Any:
            self._decodes = bool(scheduled.scheduled_cached_reqs.req_ids) and not scheduled.scheduled_new_reqs
            self._draft, self._now = 0.0, time.perf_counter()
            return work(scheduled)

        return timed

    def _last(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(constraints: Any) -> Any:
            answer = work(constraints)
            seconds = time.perf_counter() - self._now
            self.steps.append({"decodes": self._decodes, "seconds": seconds, "draft": self._draft})
            return answer

        return timed


def measure(options: argparse.Namespace) -> dict[str, Any]:
    method, k = options.part.split("/")
    model = demo_model_path()
    from vllm.tokenizers import get_tokenizer

    texts = shared.texts_named(options.texts, options.prompts)
    prompts = shared.encode(get_tokenizer(model), texts, bos=False)
    turns: dict[str, list[Any]] = {"plain": [], "drafted": []}
    with shared.engine(
        model,
        {**METHODS[method], "num_speculative_tokens": int(k)},
        max_model_len=512,
        max_num_seqs=1,
        per_request_spec_decode_metrics="detailed",
        additional_config={"gaudi_spec": {"cpu_weights": options.cpu_weights} if options.cpu_weights else {}},
    ) as llm:
        clock = Clock(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
        for drafts in (0, int(k)):
            shared.ask(llm, prompts[:2], options.temperature, WARMUP_TOKENS, drafts)
        clock.take()
        for prompt in prompts:
            for turn, drafts in (("plain", 0), ("drafted", int(k))):
                asked = shared.ask(llm, [prompt], options.temperature, options.tokens, drafts)
                turns[turn].append({**asked, "steps": clock.take()})
    return turns


# ---- in the parent -------------------------------------------------------------------------------------


def figures(turns: dict[str, list[Any]], k: int) -> dict[str, float]:
    plain, drafted = turns["plain"], turns["drafted"]
    speeds = {name: tokens_per_s(asked) for name, asked in turns.items()}
    low, high = speedup_interval(plain, drafted)
    plain_step = median(step["seconds"] for asked in plain for step in asked["steps"])
    # The last steps of a request may have no room for drafts.
    steps = [step for asked in drafted for step in asked["steps"] if step["draft"]]
    draft = median(step["draft"] for step in steps)
    verify = median(step["seconds"] - step["draft"] for step in steps)
    length = shared.Rates([request for asked in drafted for request in asked["requests"]], k).tokens_per_step()
    speedup, bound = speeds["drafted"] / speeds["plain"], length.value * plain_step / (verify + draft)
    return {
        "plain_tok_s": speeds["plain"],
        "drafted_tok_s": speeds["drafted"],
        "speedup": speedup,
        "speedup_low": low,
        "speedup_high": high,
        "tokens_per_step": length.value,
        "plain_step_ms": 1e3 * plain_step,
        "verify_ms": 1e3 * verify,
        "draft_ms": 1e3 * draft,
        "bound": bound,
        "speedup_over_bound": speedup / bound,
    }


def speedup_interval(plain: list[Any], drafted: list[Any]) -> tuple[float, float]:
    """95 %, a bootstrap over prompts; both turns of a prompt generate equally many tokens."""
    seconds_TN = np.array([[asked["seconds"] for asked in turn] for turn in (plain, drafted)])
    num = seconds_TN.shape[1]
    weights_SN = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), shared.RESAMPLES)
    plain_S, drafted_S = seconds_TN @ weights_SN.T
    low, high = np.percentile(plain_S / drafted_S, [2.5, 97.5])
    return float(low), float(high)


def tokens_per_s(turns: list[Any]) -> float:
    tokens = sum(1 + request["tokens"] for asked in turns for request in asked["requests"])
    return tokens / sum(asked["seconds"] for asked in turns)


def measure_all(options: argparse.Namespace) -> None:
    common.warn_if_busy()
    part = shared.cli(options, *SETTINGS)
    rows = []
    for method in options.methods:
        for k in options.drafts:
            common.log(f"{method}, k = {k} ...")
            name = f"{method}/{k}"
            log_name = f"speculation_speed-{method}-{k}"
            turns = common.run_part(
                Path(__file__), ["--part", name, *part], log_name=log_name, environment=shared.IN_PROCESS, seconds=1800
            )
            rows.append({"method": method, "k": k, **figures(turns, k)})
    show(rows)
    common.write_rows(options, SETTINGS, rows)


def show(rows: list[dict[str, Any]]) -> None:
    names = [name for name in rows[0] if name not in ("method", "k")]
    digits = {name: 1 if name.endswith(("_ms", "_tok_s")) else 2 for name in names}
    lines = [[row["method"], str(row["k"]), *(f"{row[name]:.{digits[name]}f}" for name in names)] for row in rows]
    header = ["method", "k", *(name.replace("_tok_s", " tokens/s").replace("_", " ") for name in names)]
    common.log(f"\nbatch 1, float32\n\n{shared.markdown(header, lines)}\n\n{common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    return shared.run_main(options, lambda: measure(options), lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
