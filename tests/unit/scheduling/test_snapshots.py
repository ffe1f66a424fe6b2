"""Which prefix has a snapshot of its recurrent state, where prompts' chunks end for that, and what vLLM's scheduler
makes of both."""

import inspect
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

from tests.support.schedulers import answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler, _keeps_all_tokens
from vllm_gaudi_spec.scheduling.snapshots import Snapshots

BLOCK = 16


def prompt(text: str, junction: int = 0) -> Any:
    """A letter is a block of tokens; one more token follows, for which a prompt is always computed."""
    hashes = [text[: end + 1] for end in range(len(text))]
    return SimpleNamespace(num_tokens=BLOCK * len(text) + 1, block_hashes=hashes, shared_prefix_boundary=junction)


def table(num_slots: int, **options: Any) -> Snapshots:
    return Snapshots(num_slots, block_size=BLOCK, hash_size=BLOCK, **options)


@pytest.mark.parametrize(
    ("start", "num_new", "num_tokens", "junction", "expected"),
    [
        (0, 40, 40, 0, 32),  # the last border
        (32, 8, 40, 0, 8),
        (0, 48, 48, 0, 32),  # a prompt computes its last token at least, so it may not start from its end
        (0, 10, 10, 0, 10),
        (0, 16, 16, 0, 16),
        (0, 30, 100, 0, 16),  # a border before the end of the budget
        (16, 9, 100, 0, 9),  # none within it
        (20, 30, 100, 0, 28),
        (0, 90, 100, 32, 32),  # where another prompt went on otherwise
        (32, 68, 100, 32, 64),
        (0, 90, 100, 37, 32),
        (99, 1, 100, 0, 1),  # a decode
        (99, 4, 100, 0, 4),  # with placeholders of drafts
        (120, 4, 100, 0, 4),
    ],
)
def test_chunk_ends_at_a_boundary(start: int, num_new: int, num_tokens: int, junction: int, expected: int) -> None:
    hashes = [*range(num_tokens // BLOCK)]
    request: Any = SimpleNamespace(num_tokens=num_tokens, block_hashes=hashes, shared_prefix_boundary=junction)
    assert table(1).cut(request, start, num_new) == expected


def test_boundary_without_a_hash_gets_no_snapshot() -> None:
    """From vLLM 0.33 on a block's hash covers the next token, which a prompt that ends at the block does not have."""
    request: Any = SimpleNamespace(num_tokens=2 * BLOCK, block_hashes=["a"], shared_prefix_boundary=0)
    snapshots = table(2)
    assert snapshots.cut(request, 0, 2 * BLOCK) == BLOCK
    assert snapshots.keep(request, 0, BLOCK) is not None
    assert snapshots.keep(request, 0, 2 * BLOCK) is None
    assert snapshots.longest(request, 2 * BLOCK) == BLOCK


def test_vllm_still_asks_there() -> None:
    parameters = list(inspect.signature(Scheduler._mamba_block_aligned_split).parameters)
    assert parameters == list(inspect.signature(SpecScheduler._mamba_block_aligned_split).parameters)
    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self._mamba_block_aligned_split(") == 2
    assert source.count("if self.need_mamba_block_aligned_split:") == 2
    assert source.count("self._get_local_prefix_cache_hit(request") == 1
    assert "request.shared_prefix_boundary,\n" in source
    assert "aligned_split" not in inspect.getsource(Scheduler._update_after_schedule)


def test_hit_is_cut_only_with_full_attention() -> None:
    """`truncate_computed_blocks` slices."""
    common: Any = dict(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    assert _keeps_all_tokens(FullAttentionSpec(**common))
    assert not _keeps_all_tokens(SlidingWindowSpec(**common, sliding_window=32))


SYSTEM = list(range(2, 2 + 5 * BLOCK))


class Engine:
    """A scheduler with some slots, and a worker that says 1."""

    def __init__(self, kind: type[SpecScheduler], folder: Path, num_slots: int = 8, **options: Any) -> None:
        upstream.apply()
        init_none_hash(sha256)
        self.scheduler: Any = scheduler_of(kind, folder, max_num_batched_tokens=512, max_num_seqs=4, **options)
        self.scheduler.keep_snapshots(num_slots)
        self.content: dict[int, tuple[int, ...]] = {}
        """By slot: the tokens whose state it has."""
        self.num_asked = self.num_found = 0
        """Tokens, in vLLM's metrics of the prefix cache."""
        self.blocks: dict[str, list[int]] = {}
        """Of KV, that a request begins with."""

    def run(self, name: str, tokens: list[int]) -> tuple[int, list[int]]:
        """How many of its tokens are not computed, and where chunks end."""
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        self.scheduler.add_request(request)
        ends, starts = [], []
        while name in self.scheduler.requests:
            scheduled: SpecSchedulerOutput = self.scheduler.schedule()
            self.blocks |= {new.req_id: [*chain(*new.block_ids)] for new in scheduled.scheduled_new_reqs}
            if count := scheduled.num_scheduled_tokens.get(name):
                ends.append(request.num_computed_tokens)
                starts.append(ends[-1] - count)
                self.check_copies(scheduled, tokens, name, starts[-1], ends[-1])
            new = {req_id: [1] if ends[-1] >= len(tokens) else [] for req_id in scheduled.num_scheduled_tokens}
            stats = self.scheduler.update_from_output(scheduled, answer(new, {}))[0].scheduler_stats
            self.num_asked += stats.prefix_cache_stats.queries
            self.num_found += stats.prefix_cache_stats.hits
        return starts[0], ends

    def check_copies(self, scheduled: SpecSchedulerOutput, tokens: list[int], name: str, start: int, end: int) -> None:
        if (slot := scheduled.state_loads.get(name)) is not None:
            assert self.content[slot] == tuple(tokens[:start]), "a request starts from the state of its own text"
        elif start:
            assert end - start < len(tokens), "what it goes on from is its row's"
        if (slot := scheduled.state_saves.get(name)) is not None:
            self.content[slot] = tuple(tokens[:end])


@pytest.mark.parametrize("kind", [SpecScheduler, SpecAsyncScheduler])
def test_second_prompt_with_a_prefix_saves_snapshot_for_the_third(kind: Any, tmp_path: Path) -> None:
    """They begin alike, and go on otherwise."""
    engine = Engine(kind, tmp_path)
    first, second, third = ([*SYSTEM, *[200 + at] * 40] for at in range(3))
    assert engine.run("1", first) == (0, [112, 120])
    assert engine.run("2", second) == (0, [80, 112, 120])
    assert engine.run("3", third) == (80, [112, 120])
    assert engine.run("1 again", first) == (112, [120])
    assert engine.blocks["3"][:5] == engine.blocks["1"][:5]
    of_others = {*engine.blocks["1"], *engine.blocks["2"]}
    assert not of_others & set(engine.blocks["3"][5:])
    assert not set(engine.blocks["2"]) & set(engine.blocks["1"]), "found, and computed again into others"
    assert (engine.num_asked, engine.num_found) == (4 * 120, 80 + 112), "what was found and not used is no hit"


def test_next_chat_turn_starts_from_last_prompt(tmp_path: Path) -> None:
    engine = Engine(SpecScheduler, tmp_path)
    engine.run("1", [*SYSTEM, 200, 201])
    assert engine.run("2", [*SYSTEM, 200, 201, 1, *[202] * 40])[0] == 80


def test_reused_slot_is_not_hit(tmp_path: Path) -> None:
    engine = Engine(SpecScheduler, tmp_path, num_slots=1)
    engine.run("1", [*SYSTEM, 200])
    engine.run("2", [*SYSTEM[::-1], 200])
    assert engine.run("1 again", [*SYSTEM, 200])[0] == 0
    assert engine.run("1 once more", [*SYSTEM, 200])[0] == 80


def test_evicted_blocks_are_not_hit(tmp_path: Path) -> None:
    """There are 31 blocks of KV."""
    engine = Engine(SpecScheduler, tmp_path)
    engine.run("1", [*SYSTEM, 200])
    engine.run("2", list(range(480)))
    assert engine.run("1 again", [*SYSTEM, 200])[0] < 80


@pytest.mark.parametrize("without_kv", [False, True])
def test_reset_drops_snapshots(without_kv: bool, tmp_path: Path) -> None:
    """They are made again, perhaps by other weights."""
    engine = Engine(SpecScheduler, tmp_path, **dict(groups=[]) if without_kv else {})
    engine.run("1", [*SYSTEM, 200])
    assert engine.scheduler.reset_prefix_cache()
    engine.content.clear()
    assert engine.run("1 again", [*SYSTEM, 200])[0] == 0
    assert list(engine.content.values()) == [tuple(SYSTEM)]


@pytest.mark.parametrize("kind", [SpecScheduler, SpecAsyncScheduler])
def test_prefixes_of_models_without_kv_are_found_by_snapshots(kind: Any, tmp_path: Path) -> None:
    engine = Engine(kind, tmp_path, groups=[])
    assert engine.run("1", [*SYSTEM, 200])[0] == 0
    assert engine.run("1 again", [*SYSTEM, 200])[0] == 80
    assert engine.run("2", [*SYSTEM[:40], *[200] * 60])[0] == 0
