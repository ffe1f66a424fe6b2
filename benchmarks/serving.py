"""A batch of requests served at full size, and the programs of one of its steps run again alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import dummy
import speculation_common as shared
import torch

_names = itertools.count()
NUM_WARMUP_STEPS = 8
"""Steps after the last prompt, or after a wait, that are not counted: some capture the graphs that they need first,
and one that is done already would count as none."""


class Counted(NamedTuple):
    """Steps that were served."""

    steps: int
    seconds: float
    tokens: int
    requests: int


class Served:
    """Requests with prompts of one length, all of them decoding, until `end`."""

    def __init__(self, llm: Any, batch: int, prompt: int, num_drafts: int, vocab_size: int, tokens: int) -> None:
        self._engine, self._runner = llm.llm_engine, dummy.runner_of(llm)
        self._lengths: dict[str, int] = {}
        generator = torch.Generator().manual_seed(0)
        for seed in range(batch):
            ids = torch.randint(3, vocab_size, (prompt,), generator=generator).tolist()
            params = shared.sampling(0.0, tokens, seed, num_drafts)
            params.detokenize = False
            name = f"served-{next(_names)}"
            self._lengths[name] = 0
            self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        while not all(self._lengths.values()):
            self._step()
        self.warm_up()

    def warm_up(self) -> None:
        for _ in range(NUM_WARMUP_STEPS):
            self._step()

    def _step(self) -> None:
        for output in self._engine.step():
            self._lengths[output.request_id] = len(output.outputs[0].token_ids)

    def run(self, steps: int) -> Counted:
        tokens, done = sum(self._lengths.values()), self._runner.recorder.num_steps
        started = time.perf_counter()
        while self._runner.recorder.num_steps < done + steps:
            self._step()
        seconds = time.perf_counter() - started
        return Counted(steps, seconds, sum(self._lengths.values()) - tokens, len(self._lengths))

    def end(self) -> None:
        self._engine.abort_request(list(self._lengths))
        while self._engine.has_unfinished_requests():
            self._engine.step()


class Tape:
    """The device programs of the newest step, as they were called."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._calls: list[tuple[str, Callable[[], Any]]] = []
        self._newest: list[tuple[str, Callable[[], Any]]] = []
        step = runner.device_step
        functions = [(step, "forward", "forward"), (step, "finish", "finish")]
        functions.append((runner.reports, "_pack", "report"))
        functions.append((step, "drafts", "report"))
        if hasattr(runner.drafting, "_draft_rows"):
            functions.append((runner.drafting, "_draft_rows", "draft"))
        for owner, name, part in functions:
            setattr(owner, name, self._noting(getattr(owner, name), part))

    def _noting(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if part == "forward":
                self._newest, self._calls = self._calls, []
            self._calls.append((part, partial(work, *args)))
            return work(*args)

        return call

    def seconds(self, repeats: int) -> dict[str, float]:
        """Each program's own time at the state that the requests have now, which is left as it was."""
        self._runner.backend.memory.synchronize()
        states = _states(self._runner)
        saved = [state.clone() for state in states]

        def restore() -> None:
            for state, current in zip(states, saved, strict=True):
                state.copy_(current)

        found: dict[str, float] = {}
        with torch.inference_mode():
            for part, call in self._newest:
                found[part] = found.get(part, 0.0) + dummy.seconds_of(call, restore, repeats)
            restore()
            self._runner.backend.memory.synchronize()
        return found


def _states(runner: Any) -> list[torch.Tensor]:
    """The tensors that steps change besides KV, and those with the positions of KV writes."""
    requests = runner.requests
    states = [requests._history, requests.computed_R, requests.num_drafts_R]
    kv_sync = getattr(runner.drafting, "_kv_sync", None)
    return states + ([kv_sync._reach_R] if hasattr(kv_sync, "_reach_R") else [])
