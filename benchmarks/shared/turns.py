"""Engines side by side, each in its own process, that take turns, so that a slow period affects them all."""

import argparse
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from math import comb
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.shared import common
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared

_PATIENCE_S = 900
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Turn = dict[str, float]
"""Maps each engine to the seconds of its turns."""


def parser_of(doc: str | None, turns: int, drafts_help: str = "drafts per step") -> argparse.ArgumentParser:
    """`turns` is the default number of turns for each engine."""
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
    """`LLM(model, **options)` in its own process with `environment`, which answers batches of fixed prompts."""

    def __init__(
        self, name: str, model: str, environment: dict[str, str], texts: str | int | None, **options: Any
    ) -> None:
        """`texts` selects the prompts for turns: one of `drafting.TEXTS`, or the length of random prompts. None if
        there are no turns."""
        common.LOGS.mkdir(exist_ok=True)
        self._log = common.LOGS / f"{name.replace('/', '-')}.log"
        self._pipe, theirs = multiprocessing.Pipe()
        started = time.perf_counter()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, model, environment, texts, options, self._log)
        )
        self._process.start()
        theirs.close()
        try:
            self.platform: str = self._answer()
        except BaseException:
            self.close()  # this engine must not run next to those that are measured
            raise
        self.startup_s = time.perf_counter() - started

    def turn(self, batch: int, tokens: int, first: int, rounds: int = 1) -> float:
        """Return the seconds that `rounds` times `batch` greedy requests take, which generate past any end token.

        At most `batch` requests run at a time. Each request generates `tokens` tokens; with several rounds, lengths
        vary around this number, so that requests end one by one. The first prompt has the index `first`.
        """
        self._pipe.send((batch, tokens, first, rounds))
        return float(self._answer())

    def counter(self, name: str) -> int:
        """Return the value of one of vLLM's counters, or 0 if there is no counter of that name."""
        self._pipe.send(name)
        value: int = self._answer()
        return value

    def call(self, work: Callable[[Any], Any]) -> Any:
        """Return the result of `work` called with the `LLM`. `work` must be a module's function or a partial of one."""
        self._pipe.send(work)
        return self._answer()

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(60)
        # This also ends the processes that it has started.
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
    pipe: Connection,
    model: str,
    environment: dict[str, str],
    texts: str | int | None,
    options: dict[str, Any],
    log: Path,
) -> None:
    os.setsid()
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    from vllm.platforms import current_platform
    from vllm.tokenizers import get_tokenizer

    from benchmarks.shared import drafting

    prompts = []
    if isinstance(texts, int):
        prompts = drafting.random_prompts(texts, options["max_num_seqs"])
    elif texts is not None:
        prompts = drafting.encode(get_tokenizer(model), drafting.texts_named(texts), bos=False)
    with drafting.engine(model, **options) as llm:
        pipe.send(type(current_platform).__module__)
        while (asked := pipe.recv()) is not None:
            if isinstance(asked, str):
                pipe.send(sum(int(metric.value) for metric in llm.get_metrics() if metric.name == asked))
                continue
            if callable(asked):
                pipe.send(asked(llm))
                continue
            batch, tokens, first, rounds = asked
            numbers = range(first, first + rounds * batch)
            lengths = [tokens if rounds == 1 else tokens // 2 + tokens * (number % 5) // 4 for number in numbers]
            # Each request has its own seed. With one seed, acceptance at a position would be a single random draw.
            params = [drafting.sampling(0.0, length, seed) for length, seed in zip(lengths, numbers, strict=True)]
            requests = [{"prompt_token_ids": prompts[number % len(prompts)]} for number in numbers]
            started = time.perf_counter()
            _answer_requests(llm.llm_engine, requests, params, batch)
            pipe.send(time.perf_counter() - started)


def _answer_requests(engine: Any, requests: list[Any], params: list[Any], concurrency: int) -> None:
    """Run all requests, `concurrency` of them at a time."""
    from vllm.sampling_params import RequestOutputKind

    waiting = enumerate(zip(requests, params, strict=True))
    num_running = 0
    while True:
        for number, (request, sampling) in islice(waiting, concurrency - num_running):
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(str(number), request, sampling)
            num_running += 1
        if not num_running:
            return
        num_running -= sum(output.finished for output in engine.step())


def take(engines: dict[str, Asked], count: int, ask: Callable[[Asked], Answer]) -> list[dict[str, Answer]]:
    """Run `count` turns of each engine, in changing order."""
    return [
        {name: ask(engines[name]) for name in (engines if number % 2 else reversed(engines))} for number in range(count)
    ]


@contextlib.contextmanager
def side_by_side() -> Iterator[dict[str, Engine]]:
    """Yield a dictionary for engines by name. Its engines are closed at the end of the block, even after an error."""
    engines: dict[str, Engine] = {}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def ratio(turns: list[Turn], one: str, other: str) -> tuple[float, float, float]:
    """Return the speed of one engine relative to another, with a 95 % confidence interval.

    Both are computed from the sorted ratios of neighboring turns: the median, and the narrowest interval between two
    ratios that covers 95 % for any distribution. With nine turns or more, a single turn that stalled is outside the
    interval. With fewer than six turns, there is no such interval, and the bounds are the minimum and maximum ratios.
    """
    ratios = sorted(turn[other] / turn[one] for turn in turns)
    skipped = max(0, _count_outside(len(ratios)) - 1)
    return median(ratios), ratios[skipped], ratios[-1 - skipped]


def is_range(num_turns: int) -> bool:
    """Whether there are too few turns for a 95 % interval."""
    return not _count_outside(num_turns)


def _count_outside(count: int) -> int:
    """Return the largest number such that at most 2.5 % of samples have fewer of `count` values below the median."""
    below = accumulate(comb(count, number) for number in range(count))
    return sum(ways <= 0.025 * 2**count for ways in below)


def interval(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
