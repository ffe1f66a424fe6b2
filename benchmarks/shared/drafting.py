"""Prompts, drafters, engines, acceptance per request with confidence intervals, and stored results."""

import argparse
import gc
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared import common
from benchmarks.shared.common import QUIET
from vllm_gaudi_spec.tools.io.command_line import Parser

TESTS = common.ROOT / "tests" / "full_tests"
DEMO = common.ROOT / "demo"
SAME_VOCAB = {"method": "draft_model", "model": str(DEMO / "draft-same-vocab")}
OTHER_VOCAB = {"method": "universal_draft", "model": str(DEMO / "draft-other-vocab")}
EAGLE = {"method": "eagle", "model": str(DEMO / "eagle-head")}
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
SUFFIX = {"method": "suffix"}

# Run the engine in the child's own process, where a benchmark can access it.
IN_PROCESS = {
    **QUIET,
    "VLLM_PLUGINS": "gaudi_spec",
    "VGS_DEVICE": os.environ.get("VGS_DEVICE") or "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# Default engine options.
ENGINE: dict[str, Any] = dict(
    dtype="float32",
    kv_cache_memory_bytes=512 << 20,
    enable_prefix_caching=False,
    disable_log_stats=False,
)
RESAMPLES = 2000


# ---- options -------------------------------------------------------------------------------------------


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that `common.run_part` uses to start a program again."""
    parser = Parser(description=doc)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    return parser


def add_acceptance_options(parser: argparse.ArgumentParser, report: str) -> None:
    """Add options of programs that measure cases one by one and store the results."""
    common.add_output_len(parser, 64)
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of each kind (default: all, 24 and 8)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="concurrency")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="only cases with one of these texts in their names (default: all)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what the report has already")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=common.LOGS / report, help="the report, which keeps finished cases"
    )


FLAGS = {"tokens": "--output-len", "drafts": "--num-speculative-tokens", "batch_size": "--batch-size"}
"""Maps attributes to option names, if the names differ."""


def cli(options: argparse.Namespace, *names: str) -> list[str]:
    """Return those of these options that were given, as arguments for a child process."""
    words: list[str] = []
    for name in names:
        value = getattr(options, name)
        if value is not None:
            words += [
                FLAGS.get(name, f"--{name}"),
                *(str(part) for part in (value if isinstance(value, list) else [value])),
            ]
    return words


def run_main(options: argparse.Namespace, part: Callable[[], Any], whole: Callable[[], None]) -> int:
    if options.part:
        common.hand_back(options.result, part())
        return 0
    return run_whole(whole)


def run_whole(whole: Callable[[], None]) -> int:
    try:
        whole()
    except RuntimeError as error:
        common.log(f"error: {error}")
        return 1
    return 0


# ---- prompts -------------------------------------------------------------------------------------------


def prompt_sets(limit: int | None = None) -> dict[str, list[str]]:
    """Return the repetitive texts from the full tests, and the eight fixed prompts from spec_decode.py."""
    sys.path.append(str(TESTS))
    from repetitive import repetitive_prompts

    from vllm_gaudi_spec.tools.compare.tasks import PROMPTS

    return {"repetitive": repetitive_prompts()[:limit], "openings": PROMPTS[:limit]}


def general_prompts(limit: int | None = None) -> list[str]:
    """Return questions that differ from those on which the demo's drafters were trained."""
    written = runpy.run_path(str(DEMO / "training_prompts.py"))
    return [written["as_chat"](question) for question in written["OUT_OF_TEMPLATE"][:limit]]


TEXTS = ("openings", "general", "mixed")


def texts_named(name: str, limit: int | None = None) -> list[str]:
    """Load one of the sets in `TEXTS`."""
    if name == "mixed":  # texts like those on which the drafters were trained, and others
        return [text for pair in zip(*map(texts_named, TEXTS[:2]), strict=False) for text in pair][:limit]
    return general_prompts(limit) if name == "general" else prompt_sets(limit)["openings"]


def random_prompts(length: int, count: int) -> list[list[int]]:
    """Return prompts of random token IDs that every vocabulary contains."""
    return np.random.default_rng(0).integers(3, 512, (count, length)).tolist()


def encode(tokenizer: Any, texts: list[str], bos: bool) -> list[list[int]]:
    """Encode texts. `bos` adds a beginning-of-text token, which some models need and others do not have."""
    before = [tokenizer.bos_token_id] if bos else []
    return [before + tokenizer.encode(text, add_special_tokens=False) for text in texts]


# ---- the engine ----------------------------------------------------------------------------------------


@contextmanager
def engine(model: str, speculative_config: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(model, speculative_config=speculative_config, **(ENGINE | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def sampling(temperature: float, tokens: int, seed: int, num_drafts: int | None = None) -> Any:
    """Return sampling parameters with the given number of drafts per request. None leaves the number to the engine."""
    from vllm import SamplingParams

    extra = None if num_drafts is None else {"num_speculative_tokens": num_drafts}
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, extra_args=extra)


def ask(llm: Any, prompts: list[list[int]], temperature: float, tokens: int, num_drafts: int) -> dict[str, Any]:
    """Run the prompts, and return the counts of each request and the total seconds."""
    params = [sampling(temperature, tokens, 1000 * num_drafts + i, num_drafts) for i in range(len(prompts))]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "requests": [counts(output.outputs[0]) for output in outputs]}


def counts(completion: Any) -> dict[str, Any]:
    """Return a request's numbers of tokens and target steps, and the accepted drafts in each step with drafts.

    The first token is excluded, because it is sampled in the prompt's step. No step extends past the end, so every
    token that was not drafted belongs to a separate step.
    """
    metrics = completion.spec_decode_metrics
    accepted = [] if metrics is None else list(metrics.per_step_accepted)
    tokens = len(completion.token_ids) - 1
    return {
        "tokens": tokens,
        "steps": tokens - sum(accepted),
        "drafted": 0 if metrics is None else metrics.num_draft_tokens,
        "accepted": accepted,
    }


# ---- rates and their intervals -------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Rates:
    """Tokens per target step and acceptance by position, with 95 % intervals from a bootstrap over requests.

    The resamples are the same for equal numbers of requests, so methods with the same prompts are compared in pairs.
    """

    def __init__(self, requests: list[dict[str, Any]], num_drafts: int) -> None:
        self._tokens_N = np.array([request["tokens"] for request in requests], dtype=float)
        self._steps_N = np.array([request["steps"] for request in requests], dtype=float)
        self._at_KN = np.array(
            [[sum(n > i for n in request["accepted"]) for request in requests] for i in range(num_drafts)],
            dtype=float,
        )
        num = len(requests)
        self._weights_SN = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), RESAMPLES)

    def tokens_per_step(self) -> Estimate:
        return _estimate(self._tokens_N.sum() / self._steps_N.sum(), self._resampled())

    def against(self, other: "Rates") -> Estimate:
        """Return the ratio of tokens per step."""
        value = self.tokens_per_step().value / other.tokens_per_step().value
        return _estimate(value, self._resampled() / other._resampled())

    def positions(self) -> list[Estimate]:
        """Return, for each number of drafts, the fraction of target steps in which at least that many were accepted.

        The last steps of a request are included, although fewer than k drafts may fit in them.
        """
        steps_S = self._weights_SN @ self._steps_N
        return [_estimate(at_N.sum() / self._steps_N.sum(), self._weights_SN @ at_N / steps_S) for at_N in self._at_KN]

    def _resampled(self) -> np.ndarray:
        return (self._weights_SN @ self._tokens_N) / (self._weights_SN @ self._steps_N)


def _estimate(value: float, resampled_S: np.ndarray) -> Estimate:
    low, high = np.percentile(resampled_S, [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


# ---- cases, measured once ------------------------------------------------------------------------------


@dataclass
class Kept:
    """The finished cases and the settings of a report, which are written after each case."""

    path: Path
    settings: dict[str, Any]
    cases: dict[str, Any]

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], fresh: bool) -> "Kept":
        if fresh or not path.exists():
            return cls(path, settings, {})
        report = json.loads(path.read_text())
        if report["settings"] != settings:
            raise RuntimeError(
                f"{path} was made with {report['settings']}, not {settings}: give --fresh, or another --json"
            )
        return cls(path, settings, report["cases"])

    def add(self, name: str, answer: Any) -> None:
        self.cases[name] = answer
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(json.dumps({"settings": self.settings, "cases": self.cases}, indent=1) + "\n")
        os.replace(scratch, self.path)


def measure_missing(program: str, names: list[str], stored: Kept, part: list[str], seconds: float = 1800) -> list[str]:
    """Measure each missing case in its own process, and return the reasons why some could not be measured."""
    failures = []
    missing = [name for name in names if name not in stored.cases]
    for index, name in enumerate(missing, 1):
        common.log(f"[{index}/{len(missing)}] {name} ...")
        log_name = f"{program}-{name.replace('/', '-')}"
        started = time.perf_counter()
        try:
            answer = common.run_part(
                program, ["--part", name, *part], log_name=log_name, environment=IN_PROCESS, seconds=seconds
            )
        except RuntimeError as error:
            failures.append(f"{name}: {error}")
            continue
        stored.add(name, answer)
        common.log(f"      {time.perf_counter() - started:.0f} s")
    return failures


def measure_kept(
    program: str,
    options: argparse.Namespace,
    names: list[str],
    settings: tuple[str, ...],
    show: Callable[[dict[str, Any]], None],
    more: tuple[str, ...] = (),
) -> None:
    """Measure the cases that are missing in the report, and then show all of them. `settings` are the options that
    determine the report; `more` are other options that child processes need."""
    stored = Kept.open(options.json, {name: getattr(options, name) for name in settings}, options.fresh)
    failures = measure_missing(program, chosen(names, options.only), stored, cli(options, *settings, *more))
    show(stored.cases)
    if failures:
        raise RuntimeError("; ".join(failures))


def chosen(names: list[str], only: list[str] | None) -> list[str]:
    found = [name for name in names if only is None or any(text in name for text in only)]
    if not found:
        raise RuntimeError(f"no case has {' or '.join(only or [])} in its name; there are {', '.join(names)}")
    return found
