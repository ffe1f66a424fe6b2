"""Engines side by side, each in a process of its own, that take turns: a slow minute of the machine meets them all."""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import numpy as np

RESAMPLES = 2000
Turn = dict[str, float]
"""Seconds of neighbouring turns, by engine."""


class Engine:
    """`LLM(model, **options)` in a process of its own, with `environment`; it answers batches of fixed prompts."""

    def __init__(self, name: str, model: str, environment: dict[str, str], **options: Any) -> None:
        common.LOGS.mkdir(exist_ok=True)
        self._log = common.LOGS / f"{name.replace('/', '-')}.log"
        self._pipe, theirs = multiprocessing.Pipe()
        started = time.perf_counter()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, model, environment, options, self._log)
        )
        self._process.start()
        theirs.close()
        self.platform: str = self._answer()
        self.startup_s = time.perf_counter() - started

    def turn(self, batch: int, tokens: int) -> float:
        """Seconds for so many requests of so many tokens, past any end token."""
        self._pipe.send((batch, tokens))
        seconds: float = self._answer()
        return seconds

    def counter(self, name: str) -> int:
        """One of vLLM's counters; 0 where there is none of that name."""
        self._pipe.send(name)
        value: int = self._answer()
        return value

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(60)
        self._process.kill()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"an engine died; its last words are in {self._log}") from None


def _serve(pipe: Connection, model: str, environment: dict[str, str], options: dict[str, Any], log: Path) -> None:
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    import speculation_common as shared
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.tokenizers import get_tokenizer

    prompts = shared.encode(get_tokenizer(model), shared.prompt_sets()["openings"], bos=False)
    llm = LLM(model, **options)
    pipe.send(type(current_platform).__module__)
    while (asked := pipe.recv()) is not None:
        if isinstance(asked, str):
            pipe.send(sum(int(metric.value) for metric in llm.get_metrics() if metric.name == asked))
            continue
        batch, tokens = asked
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        wanted = [{"prompt_token_ids": prompts[place % len(prompts)]} for place in range(batch)]
        started = time.perf_counter()
        llm.generate(wanted, sampling, use_tqdm=False)
        pipe.send(time.perf_counter() - started)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def take(engines: dict[str, Engine], count: int, ask: Callable[[Engine], float]) -> list[Turn]:
    """So many turns of each, in changing order."""
    return [
        {name: ask(engines[name]) for name in (engines if number % 2 else reversed(engines))} for number in range(count)
    ]


def close(engines: Iterable[Engine]) -> None:
    for engine in engines:
        engine.close()


def ratio(turns: list[Turn], one: str, other: str) -> tuple[float, float, float]:
    """Speed of one over that of the other, and its 95 % interval over turns."""
    logs = np.log([turn[other] / turn[one] for turn in turns])
    picks = np.random.default_rng(0).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[picks].mean(1), [2.5, 97.5]))
    return float(np.exp(logs.mean())), float(low), float(high)


def interval(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
