"""Drafters on the device, in engines whose drafter is right as long as it reads the row's own text.

A token, state, slot or position that is off by one makes its draft a wrong one.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.fakes import CapturingBackend, CompilingBackend, HostBackend
from tests.support.small_engine import (
    _HASHED,
    ASSISTANT,
    BLOCK,
    BLOCK_DRAFTER,
    CHAIN,
    HEAD,
    HEADS,
    PARALLEL,
    PARALLEL_HEAD,
    ROOMY,
    SmallEngine,
    Variant,
    _number,
    greedy_text,
)
from tests.support.warm_up import run_jobs
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.metrics import DRAFTER_FAULTS
from vllm_gaudi_spec.records import DraftRound, Hidden

PROMPTS = {"a": [20, 21, 22], "b": list(range(30, 56)), "c": [9], "d": [7, 8]}
MAX_TOKENS = 30
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
WITHOUT_DRAFTS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, extra_args={"num_speculative_tokens": 0})
METHODS = ["draft_model", PARALLEL, BLOCK_DRAFTER, *HEADS]
FEW_BLOCKS = 17
"""Number of KV blocks, including block 0: just enough for one request of the maximum length."""


@pytest.fixture(autouse=True)
def as_in_a_worker() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine_of(method: str, folder: Path, *, num_blocks: int = ROOMY, **options: Any) -> SmallEngine:
    return SmallEngine(Variant(method, num_blocks=num_blocks, **options), folder)


def start(engine: SmallEngine, prompts: dict[str, list[int]] = PROMPTS) -> None:
    """Add requests one by one, so that no prompt takes the room of another request's drafts."""
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
        while not engine.texts[name]:
            engine.step()


def serve(engine: SmallEngine, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    """Run a request to its end and return its blocks."""
    engine.add(name, prompt, params)
    while name not in engine.ended:
        engine.step()
    blocks = engine.held[name].blocks
    engine.finish()
    return blocks


def find_shared(blocks: list[int], other: list[int]) -> set[int]:
    return {block for block, same in zip(blocks, other, strict=False) if block == same}


def extend(engine: SmallEngine, name: str, prompt: list[int], length: int = 30) -> list[int]:
    """Return a prompt that begins like a request that has ended."""
    return [*[*prompt, *engine.texts[name]][:length], 9]


def find_sums(text: list[int]) -> list[int]:
    """Return the number from which the token after each position follows."""
    return (_number(torch.tensor(text), torch.arange(len(text))).cumsum(0) % _HASHED).tolist()


def models_of(engine: SmallEngine) -> list[Any]:
    drafter: Any = engine.runner.drafter
    return [drafter, *getattr(drafter, "_layers", ())]


def record_written(engine: SmallEngine) -> set[int]:
    """Return the set of blocks in which the drafter writes KV from now on."""
    written: set[int] = set()

    def write(inputs: Inputs, carried_TH: torch.Tensor | None = None, *, forward: Any) -> Hidden:
        written.update((inputs.slots[0] // BLOCK).tolist())
        hidden: Hidden = forward(inputs, carried_TH)
        return hidden

    for model in models_of(engine):
        model.forward = partial(write, forward=model.forward)
    return written


def change_logits(engine: SmallEngine, change: Any) -> None:
    """Replace the drafter's logits by what `change` makes of them and of the sums from which they follow."""
    for model in models_of(engine):
        logits = model.logits
        model.logits = lambda hidden, logits=logits: change(logits(hidden), hidden[:, 0].long())


def count_accepted(method: str, prompt: list[int], text: list[int], num_drafts: int) -> int:
    """Return the number of accepted drafts if those are wrong, and no others, that follow a multiple of 5."""
    is_wrong = [number % 5 == 0 for number in find_sums([*prompt, *text])]
    known, end, total = len(prompt) + 1, len(prompt) + MAX_TOKENS, 0
    while known < end:
        most = min(num_drafts, end - 1 - known)
        if method == CHAIN and known < 3:  # each of three layers needs a position of its own
            most = min(most, known)
        accepted = next((place for place in range(most) if is_wrong[known - 1 + place]), most)
        total, known = total + accepted, known + accepted + 1
    return total


@pytest.mark.parametrize(
    ("method", "num_drafts"),
    # A chain of one layer is a head.
    [(method, number) for method in METHODS for number in (1, 2, 3) if number > 1 or method != CHAIN],
)
@pytest.mark.parametrize(("overlap", "backend"), [(False, HostBackend), (True, CapturingBackend)])
def test_only_intended_mistakes_are_rejected(
    method: str, num_drafts: int, overlap: bool, backend: type[HostBackend], tmp_path: Path
) -> None:
    """Steps accept none, some or all drafts, and what the drafter wrote for rejected ones is not read."""
    engine = engine_of(method, tmp_path, num_drafts=num_drafts, overlap=overlap, backend=backend)
    change_logits(
        engine, lambda logits_NV, sums_N: torch.where((sums_N % 5 == 0)[:, None], logits_NV.roll(1, -1), logits_NV)
    )
    start(engine)
    engine.finish()
    assert engine.texts == {name: greedy_text(prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()}
    expected = [count_accepted(method, prompt, engine.texts[name], num_drafts) for name, prompt in PROMPTS.items()]
    assert engine.num_accepted == sum(expected)


@pytest.mark.parametrize(
    ("method", "num_drafts"),
    [("draft_model", 8), (PARALLEL, 8), (HEAD, 8), (PARALLEL_HEAD, 8), (CHAIN, 6), (ASSISTANT, 8)],
)
def test_long_drafts_are_accepted(method: str, num_drafts: int, tmp_path: Path) -> None:
    engine = engine_of(method, tmp_path, num_drafts=num_drafts)
    start(engine, {"b": PROMPTS["b"]})
    engine.finish()
    assert engine.num_accepted == engine.num_verified > 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_row_beyond_drafter_length_continues_without_drafts(method: str, overlap: bool, tmp_path: Path) -> None:
    """Requests before that length draft up to it, whatever else is in the batch."""
    length, long = 28, {"long": list(range(60, 90))}
    engine = engine_of(method, tmp_path, overlap=overlap, drafter_len=length)

    def read(inputs: Inputs, carried_TH: torch.Tensor | None = None, *, forward: Any) -> Hidden:
        assert int(inputs.positions_T.max()) < length
        hidden: Hidden = forward(inputs, carried_TH)
        return hidden

    for model in models_of(engine):
        model.forward = partial(read, forward=model.forward)
    start(engine, long)
    for _ in range(6):
        engine.step()
    assert engine.num_verified == 0
    start(engine)
    engine.finish()
    assert engine.texts == {name: greedy_text(prompt, MAX_TOKENS) for name, prompt in (PROMPTS | long).items()}
    assert engine.num_accepted == engine.num_verified > 30


@pytest.mark.parametrize("method", METHODS)
def test_prompt_is_read_in_batch_with_row_beyond_drafter_length(method: str, tmp_path: Path) -> None:
    length = 28
    engine = engine_of(method, tmp_path, drafter_len=length)
    engine.add("long", list(range(40, 82)), SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    engine.step()
    engine.step()
    starts: list[list[int]] = []
    target: Any = engine.runner.target
    forward = target.forward
    target.forward = lambda inputs, *given: starts.append(inputs.call.starts_B.tolist()) or forward(inputs, *given)
    engine.add("short", list(range(20, 28)), GREEDY)
    engine.finish()
    assert min(starts[0]) == 0 < length < max(starts[0]), "the last chunk of one prompt is with the other prompt"
    assert engine.num_accepted == engine.num_verified > 10


def test_row_is_read_although_host_counts_ahead(tmp_path: Path) -> None:
    """The host counts drafts in flight as accepted, with which the row would exceed the drafter's length."""
    engine = engine_of(HEAD, tmp_path, overlap=True, drafter_len=33)
    whole = [*PROMPTS["b"], *greedy_text(PROMPTS["b"], MAX_TOKENS)]
    late = torch.tensor(find_sums(whole)[29:])
    change_logits(
        engine,
        lambda logits_NV, sums_N: torch.where(torch.isin(sums_N, late)[:, None], logits_NV, logits_NV.roll(1, -1)),
    )
    start(engine, {"b": PROMPTS["b"]})
    engine.finish()
    assert engine.num_accepted == 3, "of the drafts after 27 to 30 tokens only the last are right"


@pytest.mark.parametrize("method", ["draft_model", PARALLEL, HEAD, CHAIN])
@pytest.mark.parametrize("num_off", [1, 2, 4, 40])
def test_row_drafts_in_first_step_after_steps_without_drafts(method: str, num_off: int, tmp_path: Path) -> None:
    """A row reads the tokens of such steps before it drafts again."""
    engine, num_drafts = engine_of(method, tmp_path, adaptive=True), 3
    engine.scheduler._step_times.choose = lambda *args, **kwargs: num_drafts
    engine.add("a", PROMPTS["a"], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    for _ in range(2):
        engine.step()
    num_drafts = 0
    for _ in range(num_off):
        engine.step()
    num_drafts, verified = 3, engine.num_verified
    for _ in range(2):
        engine.step()
    assert engine.num_verified == verified + 3
    engine.finish()
    assert engine.num_accepted == engine.num_verified


# --- shared blocks ---


@pytest.mark.parametrize("method", ["draft_model", PARALLEL, HEAD, PARALLEL_HEAD, CHAIN])
@pytest.mark.parametrize("params", [GREEDY, WITHOUT_DRAFTS], ids=["drafts", "without drafts"])
def test_shared_blocks_are_read_once(method: str, params: SamplingParams, tmp_path: Path) -> None:
    """A head reads them even without drafts. A draft model reads them for the first request that drafts."""
    engine = engine_of(method, tmp_path)
    blocks = serve(engine, "a", PROMPTS["a"], params)
    verified, written = engine.num_verified, record_written(engine)
    shared = find_shared(blocks, serve(engine, "b", extend(engine, "a", PROMPTS["a"])))
    assert len(shared) >= 6
    assert shared & written == (set() if method in HEADS or params is GREEDY else shared)
    assert engine.num_accepted == engine.num_verified > verified + 20


@pytest.mark.parametrize("method", ["draft_model", PARALLEL])
def test_half_read_blocks_are_read_for_next_request(method: str, tmp_path: Path) -> None:
    """A request stops drafting in the middle of a block."""
    engine, num_drafts = engine_of(method, tmp_path, adaptive=True), 3
    engine.scheduler._step_times.choose = lambda *args, **kwargs: num_drafts
    start(engine, {"a": PROMPTS["a"]})
    engine.step()
    num_drafts = 0
    engine.finish()
    num_drafts = 3
    serve(engine, "b", extend(engine, "a", PROMPTS["a"]))
    assert engine.num_accepted == engine.num_verified > 20


@pytest.mark.parametrize("method", ["draft_model", PARALLEL])
def test_reused_block_is_unread_for_its_new_owner(method: str, tmp_path: Path) -> None:
    engine = engine_of(method, tmp_path, num_blocks=FEW_BLOCKS)
    old = serve(engine, "old", PROMPTS["b"])
    verified, prompt = engine.num_verified, list(range(60, 84))
    new = serve(engine, "new", prompt, WITHOUT_DRAFTS)
    shared = find_shared(new, serve(engine, "shares", extend(engine, "new", prompt, 40)))
    assert set(new[6:10]) <= shared & set(old), "blocks of the new owner's answer"
    assert engine.num_accepted == engine.num_verified > verified + 10


# --- faults ---


def fail(*given: Any, **named: Any) -> Any:
    raise ZeroDivisionError("a drafter's own mistake")


def owner_of(engine: SmallEngine, part: str) -> Any:
    return engine.runner.drafter if part == "forward" else engine.runner.drafting._proposer


def break_a_step(engine: SmallEngine, part: str) -> None:
    """Run a step in which the drafter fails."""
    owner = owner_of(engine, part)
    setattr(owner, part, fail)
    engine.step()
    delattr(owner, part)


@pytest.mark.parametrize("method", ["draft_model", HEAD])
@pytest.mark.parametrize("part", ["forward", "propose"])
def test_warm_up_errors_are_raised(method: str, part: str, tmp_path: Path) -> None:
    engine = engine_of(method, tmp_path)
    setattr(owner_of(engine, part), part, fail)
    with pytest.raises(ZeroDivisionError):
        run_jobs(engine.runner.drafting.jobs(), engine.runner.recorder)
    assert engine.runner.drafting.take_rounds() == []


def test_errors_are_raised_with_several_ranks() -> None:
    somebody: Any = [type("Somebody", (), {"req_id": "a"})]
    with pytest.raises(ZeroDivisionError):
        Guard(independent=False).handle_error(ZeroDivisionError(), somebody)
    guard = Guard(independent=True)
    guard.handle_error(ZeroDivisionError(), somebody)
    guard.handle_error(ZeroDivisionError(), somebody)
    assert guard.take_rounds() == [DraftRound(("a",), worked=False)], "one step, one round"


@pytest.mark.parametrize(
    ("method", "part"), [("draft_model", "propose"), (HEAD, "propose"), ("draft_model", "forward")]
)
def test_failed_round_does_not_change_later_drafts(method: str, part: str, tmp_path: Path) -> None:
    """A draft model reads again what it failed to read."""
    engine = engine_of(method, tmp_path)
    start(engine)
    break_a_step(engine, part)
    verified = engine.num_verified
    engine.step()
    assert engine.num_verified == verified, "the failed round made no drafts"
    engine.finish()
    assert engine.num_accepted == engine.num_verified > verified + 20
    assert engine.counts[DRAFTER_FAULTS, ""] == 1


@pytest.mark.parametrize("how", ["its read fails", "it is excluded"])
def test_blocks_are_not_shared_after_failed_head_read(how: str, tmp_path: Path) -> None:
    """The head may have written NaN there, which would fail for every reader. The next owner writes them anew."""
    engine = engine_of(HEAD, tmp_path, num_blocks=FEW_BLOCKS)
    start(engine, {"b": PROMPTS["b"]})
    if how == "its read fails":
        break_a_step(engine, "forward")
    else:
        engine.runner.drafting.update_drafter_state([], [engine.runner.requests.by_id["b"]], disabled=False)
    engine.step()  # may verify drafts that the scheduler already has
    verified, faulty = engine.num_verified, engine.held["b"].blocks
    engine.finish()
    assert find_shared(faulty, serve(engine, "shares", PROMPTS["b"]))
    assert engine.num_verified == verified
    own = serve(engine, "own", PROMPTS["b"][::-1])
    assert set(faulty) & find_shared(own, serve(engine, "shares own", PROMPTS["b"][::-1]))
    assert engine.num_accepted > verified + 40, "both draft"


def test_exclusion_holds_until_row_is_freed(tmp_path: Path) -> None:
    engine = engine_of("draft_model", tmp_path)
    start(engine)
    drafting, by_id = engine.runner.drafting, engine.runner.requests.by_id

    drafting.update_drafter_state([by_id["a"]], [by_id["b"]], disabled=False)
    for _ in range(2):
        engine.step()
        waiting = {name: int(engine.runner.requests.num_drafts_R[by_id[name].row]) for name in PROMPTS}
        assert waiting == {"a": 3, "b": 0, "c": 3, "d": 3}
    row = by_id["b"].row
    engine.abort("b")
    start(engine, {"e": [5, 6]})
    assert by_id["e"].row == row
    assert engine.runner.requests.num_drafts_R[row] == 3
    drafting.update_drafter_state([], [], disabled=True)
    assert drafting.cap_scheduled_drafts([by_id["e"]], [3]).tolist() == [0]
    verified = engine.num_verified
    engine.finish()
    assert engine.num_verified <= verified + 3 * len(PROMPTS)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", [HostBackend, CompilingBackend])
def test_nan_in_row_removes_its_drafts_and_is_reported(
    overlap: bool, backend: type[HostBackend], tmp_path: Path
) -> None:
    engine = engine_of("draft_model", tmp_path, overlap=overlap, backend=backend)
    whole = [*PROMPTS["b"], *greedy_text(PROMPTS["b"], MAX_TOKENS)]
    faulty = find_sums(whole)[len(PROMPTS["b"]) + 8]
    change_logits(engine, lambda logits_NV, sums_N: torch.where((sums_N == faulty)[:, None], torch.nan, logits_NV))
    start(engine)
    engine.finish()
    assert engine.texts == {name: greedy_text(prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()}
    assert engine.num_accepted == engine.num_verified > 60
    assert 0 < engine.counts[DRAFTER_FAULTS, ""] <= 3
