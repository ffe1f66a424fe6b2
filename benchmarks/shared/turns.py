"""Engines side by side, each in a process of its own, that take turns: a slow minute of the machine meets them all."""

import argparse
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.shared import common
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared

# 0.975 quantiles of Student's t by degrees of freedom; beyond, that of the normal distribution is near.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)
_PATIENCE_S = 900
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Turn = dict[str, float]
"""Maps each engine to the seconds of its turns."""


def parser_of(doc: str | None, turns: int, drafts_help: str = "drafts per step") -> argparse.ArgumentParser:
    """`turns`: the default, of each engine."""
    from benchmarks.shared import drafting

    parser = Parser(description=doc)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4, 8, 16], metavar="B", help="batch sizes (concurrency)"
    )
    add_shared(
        parser.add_argument,
        "--num-speculative-tokens",
        dest="drafts",
        type=int,
        default=3,
        metavar="K",
        help=drafts_help,
    )
    common.add_output_len(parser, 64)
    parser.add_argument(
        "--turns", type=int, default=turns, metavar="N", help="measured turns of each engine, at each batch size"
    )
    parser.add_argument("--texts", choices=drafting.TEXTS, default="general", help="which set of prompts")
    parser.add_argument("--model", help="Hugging Face id or folder (default: the demo model)")
    common.add_json(parser)
    return parser


class Engine:
    """`LLM(model, **options)` in a process of its own, with `environment`; it answers batches of fixed prompts."""

    def __init__(self, name: str, model: str, environment: dict[str, str], texts: str | int, **options: Any) -> None:
        """`texts`: which prompts, by the name that `speculation_common` gives them; or the length of random ones."""
        common.LOGS.mkdir(exist_ok=True)
        self._log = common.LOGS / f"{name.replace('/', '-')}.log"
        self._pipe, theirs = multiprocessing.Pipe()
        started = time.perf_counter()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, model, environment, texts, options, self._log)
        )
        self._process.start()
        theirs.close()
        self.platform: str = self._answer()
        self.startup_s = time.perf_counter() - started

    def turn(self, batch: int, tokens: int, temperature: float = 0.0, top_p: float = 1.0, first: int = 0) -> float:
        """Return the seconds that `batch` requests of `tokens` tokens take, past any end token.

        Their prompts begin with the one of index `first`.
        """
        self._pipe.send((batch, tokens, temperature, top_p, first))
        return float(self._answer())

    def counter(self, name: str) -> int:
        """One of vLLM's counters, or how often a histogram counted; 0 where there is none of that name."""
        self._pipe.send(name)
        value: int = self._answer()
        return value

    def call(self, work: Callable[[Any], Any]) -> Any:
        """Return what `work`, which has to be a function of a module or a partial of one, returns for the `LLM`."""
        self._pipe.send(work)
        return self._answer()

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(60)
        # With it goes what it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self) -> Any:
        try:
            if self._pipe.poll(_PATIENCE_S):
                return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"an engine died; its last words are in {self._log}") from None
        raise RuntimeError(f"an engine does not answer; its last words are in {self._log}")


def _serve(
    pipe: Connection, model: str, environment: dict[str, str], texts: str | int, options: dict[str, Any], log: Path
) -> None:
    os.setsid()
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    from vllm.platforms import current_platform
    from vllm.tokenizers import get_tokenizer
    from vllm.v1.metrics.reader import Histogram

    from benchmarks.shared import drafting

    if isinstance(texts, int):
        prompts = drafting.random_prompts(texts, options["max_num_seqs"])
    else:
        prompts = drafting.encode(get_tokenizer(model), drafting.texts_named(texts), bos=False)
    with drafting.engine(model, **options) as llm:
        pipe.send(type(current_platform).__module__)
        while (asked := pipe.recv()) is not None:
            if isinstance(asked, str):
                found = [metric for metric in llm.get_metrics() if metric.name == asked]
                pipe.send(sum(metric.count if isinstance(metric, Histogram) else int(metric.value) for metric in found))
                continue
            if callable(asked):
                pipe.send(asked(llm))
                continue
            batch, tokens, temperature, top_p, first = asked
            # Seeds of their own: with one for all, what is accepted at a position is one draw.
            params = [drafting.sampling(temperature, tokens, seed) for seed in range(batch)]
            for one in params:
                one.top_p = top_p
            requests = [{"prompt_token_ids": prompts[i % len(prompts)]} for i in range(first, first + batch)]
            started = time.perf_counter()
            llm.generate(requests, params, use_tqdm=False)
            pipe.send(time.perf_counter() - started)


def take(engines: dict[str, Asked], count: int, ask: Callable[[Asked], Answer]) -> list[dict[str, Answer]]:
    """So many turns of each, in changing order."""
    return [
        {name: ask(engines[name]) for name in (engines if number % 2 else reversed(engines))} for number in range(count)
    ]


@contextlib.contextmanager
def side_by_side() -> Iterator[dict[str, Engine]]:
    """Yield a dictionary for engines by name. The engines in it end with the block, whatever happens."""
    engines: dict[str, Engine] = {}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def ratio(turns: list[Turn], one: str, other: str) -> tuple[float, float, float]:
    """Speed of one over that of the other, and its 95 % interval: Student's t over the logarithms of the turns."""
    logs = np.log([turn[other] / turn[one] for turn in turns])
    quantile = _T[min(len(logs) - 1, len(_T)) - 1] if len(logs) > 1 else float("inf")
    reach = quantile * logs.std(ddof=1) / len(logs) ** 0.5 if len(logs) > 1 else float("inf")
    return tuple(float(np.exp(logs.mean() + sign * reach)) for sign in (0, -1, 1))


def interval(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
