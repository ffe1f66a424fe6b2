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
    BLOCK_DRAFTER,
    CHAIN,
    HEAD,
    HEADS,
    PARALLEL,
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
METHODS = ["draft_model", PARALLEL, BLOCK_DRAFTER, *HEADS]


@pytest.fixture(autouse=True)
def as_in_a_worker() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine_of(method: str, folder: Path, *, num_drafts: int = 3, **options: Any) -> SmallEngine:
    return SmallEngine(Variant(method, num_blocks=ROOMY, num_drafts=num_drafts, **options), folder)


def start(engine: SmallEngine, prompts: dict[str, list[int]] = PROMPTS) -> None:
    """Add requests one by one, so that no prompt takes the room of another request's drafts."""
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
        while not engine.texts[name]:
            engine.step()


def find_sums(text: list[int]) -> list[int]:
    """Return the number from which the token after each position follows."""
    return (_number(torch.tensor(text), torch.arange(len(text))).cumsum(0) % _HASHED).tolist()


def models_of(engine: SmallEngine) -> list[Any]:
    drafter: Any = engine.runner.drafter
    return [drafter, *getattr(drafter, "_layers", ())]


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_drafts", [2, 3])
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


@pytest.mark.parametrize(("method", "num_drafts"), [("draft_model", 8), (HEAD, 8), (CHAIN, 6), (ASSISTANT, 8)])
def test_more_drafts_than_layers(method: str, num_drafts: int, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("ends_off", [False, True])
def test_tokens_of_steps_without_drafts_are_read_before_they_count(method: str, ends_off: bool, tmp_path: Path) -> None:
    """The drafter has read nothing of such steps: neither the row itself nor a row that shares its blocks drafts from
    them."""
    engine = engine_of(method, tmp_path, adaptive=True)
    is_on = True
    engine.scheduler._step_times.choose = lambda *args, **kwargs: 3 if is_on else 0
    start(engine, {"a": PROMPTS["a"]})
    engine.step()
    is_on = False
    for _ in range(8):
        engine.step()
    if ends_off:
        engine.finish()
    is_on = True
    engine.finish()
    start(engine, {"b": [*PROMPTS["a"], *engine.texts["a"][:26], 9]})
    engine.finish()
    assert engine.num_accepted == engine.num_verified > 20


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
    """The head may have written NaN there, which would fail for every reader."""
    engine = engine_of(HEAD, tmp_path)
    start(engine, {"b": PROMPTS["b"]})
    if how == "its read fails":
        break_a_step(engine, "forward")
        engine.step()
    else:
        engine.runner.drafting.update_drafter_state([], [engine.runner.requests.by_id["b"]], disabled=False)
    verified = engine.num_verified
    engine.finish()
    start(engine, {"shares": PROMPTS["b"]})
    assert engine.runner.requests.by_id["shares"].num_prompt == len(PROMPTS["b"])
    engine.finish()
    assert engine.num_verified == verified
    start(engine, {"own": PROMPTS["b"][::-1]})
    engine.finish()
    assert engine.num_accepted > 15


def test_exclusion_holds_until_row_is_freed(tmp_path: Path) -> None:
    engine = engine_of("draft_model", tmp_path)
    start(engine)
    drafting, by_id = engine.runner.drafting, engine.runner.requests.by_id
    drafting.update_drafter_state([by_id["a"]], [by_id["b"]], disabled=False)
    for _ in range(2):
        engine.step()
        waiting = {name: int(engine.runner.requests.num_drafts_R[by_id[name].row]) for name in PROMPTS}
        assert waiting == {"a": 3, "b": 0, "c": 3, "d": 3}
    drafting.update_drafter_state([], [], disabled=True)
    assert drafting.cap_scheduled_drafts([by_id["a"]], [3]).tolist() == [0]
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
