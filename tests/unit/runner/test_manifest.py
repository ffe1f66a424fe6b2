"""The manifest is closed: whatever a scheduler requests in a small configuration is a listed signature."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.fakes import HostBackend, batches_of, cached, new_request, step
from vllm_gaudi_spec.config import Options
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.shapes import Shapes

BLOCK = 16
SCHEDULES = 10_000


class FlatBackend(HostBackend):
    """A device that captures graphs and decodes over lists of blocks."""

    traits = replace(
        HostBackend.traits, captures=True, flat_decode=True, block_size=BLOCK, smallest_prefill=16, max_drafts=8
    )


class PaddedBackend(FlatBackend):
    traits = replace(FlatBackend.traits, flat_decode=False)


class Scheduler:
    """A random scheduler that keeps vLLM's promises: chunks in order, and blocks for all scheduled tokens."""

    def __init__(self, rng: random.Random, max_rows: int, max_tokens: int, max_len: int, num_drafts: int) -> None:
        self.rng = rng
        self.max_rows, self.max_tokens, self.max_len, self.num_drafts = max_rows, max_tokens, max_len, num_drafts
        self.running: dict[str, list[int]] = {}
        """Known tokens, computed tokens and blocks of each request."""
        self.num_made = 0

    def step(self) -> tuple[object, dict[str, int]]:
        rng = self.rng
        finished = {name for name in self.running if rng.random() < 0.15}
        for name in finished:
            del self.running[name]
        budget, tokens, new, blocks = self.max_tokens, {}, [], {}
        computed = {name: state[1] for name, state in self.running.items()}
        drafts: dict[str, int] = {}
        for name, state in self.running.items():
            left = state[0] - state[1]
            count = min(left, budget, rng.randint(1, left))
            if left == 1:
                drafts[name] = min(rng.choice((0, self.num_drafts)), self.max_len - state[0], max(budget - 1, 0))
                count += drafts[name]
            if not count or budget < 1:
                continue
            tokens[name] = count
            budget -= count
            if added := self._grow(state, state[1] + count):
                blocks[name] = added
        for _ in range(rng.randint(0, 2)):
            if len(self.running) == self.max_rows or budget < 1:
                break
            length = rng.randint(1, self.max_len - 1)
            hit = rng.choice((0, 0, (length - 1) // BLOCK * BLOCK, length - 1))
            count = min(length - hit, budget)
            name = f"r{self.num_made}"
            self.num_made += 1
            state = [length, hit, 0]
            ids = self._grow(state, hit + count)
            new.append(new_request(name, [1] * length, ids, num_computed=hit))
            self.running[name] = state
            tokens[name] = count
            budget -= count
        running = cached({n: c for n, c in computed.items() if n in tokens}, blocks=blocks)
        return step(tokens, new=new, running=running, finished=finished), drafts

    def _grow(self, state: list[int], length: int) -> list[int]:
        needed = -(-length // BLOCK)
        added = list(range(1 + state[2], 1 + needed))
        state[2] = max(state[2], needed)
        return added

    def done(self, scheduled: object, drafts: dict[str, int]) -> None:
        for name, count in scheduled.num_scheduled_tokens.items():  # type: ignore[attr-defined]
            state = self.running[name]
            decodes = state[1] + count - drafts.get(name, 0) == state[0]
            if not decodes:
                state[1] += count
                continue
            said = 1 + self.rng.randint(0, drafts.get(name, 0))
            state[1] = state[0] + said - 1
            state[0] = min(state[0] + said, self.max_len)
            if state[0] == self.max_len:
                state[1] = self.max_len - 1


def run(rng: random.Random, backend: HostBackend, num_steps: int) -> int:
    """Run a schedule and return the number of distinct shapes. Fail at one that is not listed."""
    max_rows, max_len = rng.randint(1, 6), rng.choice((40, 96, 200))
    num_drafts, max_tokens = rng.choice((0, 1, 3, 5)), rng.choice((16, 64, 256))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_rows, max_num_batched_tokens=max_tokens),
        model_config=SimpleNamespace(max_model_len=max_len, is_moe=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    options = Options(bucket_strategy=rng.choice((None, "linear")), prefill_rows=rng.choice((None, (1, 2), (1, 4))))
    shapes = Shapes.from_config(config, options, backend, num_drafts)  # type: ignore[arg-type]
    listed, sizes = set(shapes.all()), set(shapes.decode_sizes())
    requests = Requests(
        backend,
        max_rows=max_rows,
        max_len=shapes.max_context + 8,
        block_sizes=[BLOCK],
        max_context=shapes.max_context,
        seed=0,
    )  # type: ignore[arg-type]
    scheduler = Scheduler(rng, max_rows, max_tokens, max_len, num_drafts)
    asked = 0
    for _ in range(num_steps):
        scheduled, drafts = scheduler.step()
        requests.apply(scheduled)  # type: ignore[arg-type]
        batches = batches_of(scheduled, requests, shapes, drafts)  # type: ignore[arg-type]
        finishing = [member for batch in batches for member in batch.list_finishing()]
        for batch in batches:
            assert batch.shape in listed, f"{batch.shape} is not among {len(listed)} shapes"
            if backend.traits.flat_decode and batch.shape.phase == "decode":
                entries = batch.inputs.split().blocks.flat[0]
                assert entries.shape == (3, batch.shape.context)
        if finishing:
            rows = shapes.fit_rows(len(finishing))
            ends = [end + 1 + num_drafts for _, end in finishing]
            assert (rows, shapes.decode_context(ends)) in sizes, "a round of drafts that is not listed"
        asked += len(batches)
        scheduler.done(scheduled, drafts)
    return asked


@pytest.mark.parametrize("backend", [FlatBackend, PaddedBackend])
@pytest.mark.parametrize("part", range(4))
def test_random_schedules_stay_within_the_manifest(backend: type[FlatBackend], part: int) -> None:
    asked = 0
    for seed in range(SCHEDULES // 8):
        asked += run(random.Random(f"{backend.__name__} {part} {seed}"), backend(), num_steps=8)
    assert asked > SCHEDULES // 8 * 4


def test_manifest_test_detects_a_missing_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the largest decode, some schedule needs a shape that is not listed."""
    whole = Shapes.all

    def all_but_verifies(self: Shapes) -> list[object]:
        return [shape for shape in whole(self) if shape.phase != "decode" or shape.queries == 1]

    monkeypatch.setattr(Shapes, "all", all_but_verifies)
    with pytest.raises(AssertionError, match="is not among"):
        sum(run(random.Random(seed), FlatBackend(), num_steps=8) for seed in range(50))


def test_warm_up_and_steps_copy_tensors_of_the_same_shapes() -> None:
    """Otherwise steps would need graphs that warm-up has not made."""
    backend = FlatBackend()
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=96, is_moe=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    shapes = Shapes.from_config(config, Options(), backend, 3)  # type: ignore[arg-type]
    requests = Requests(
        backend, max_rows=4, max_len=shapes.max_context + 8, block_sizes=[BLOCK], max_context=shapes.max_context, seed=0
    )  # type: ignore[arg-type]
    requests.apply(step({"a": 1}, new=[new_request("a", [1] * 40, [1, 2, 3], num_computed=39)]))
    request = requests.by_id["a"]
    shape = shapes.decode(1, [40])
    rows = torch.full((shape.rows,), requests.pad_row)
    warm = requests.decode_blocks(rows.numpy(), [], shape.context)
    rows[0] = request.row
    used = requests.decode_blocks(rows.numpy(), [40], shape.context)
    assert [t.shape for t in (*warm.tables, *warm.flat)] == [t.shape for t in (*used.tables, *used.flat)]
