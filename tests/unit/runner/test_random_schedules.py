"""Whatever comes, goes, and is interrupted: a request says what it says alone, and nothing of it stays behind.

Hypothesis draws schedules: requests are admitted and aborted, memory is so scarce that the scheduler preempts, prompts
are cut into chunks and found in the prefix cache, and now and then everything that runs is preempted at once.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from vllm import SamplingParams

from tests.full_tests.tiny_models import VOCAB
from tests.support.fakes import CapturingBackend, CompilingBackend
from tests.support.small_engine import (
    ASSISTANT,
    BLOCK_DRAFTER,
    CHAIN,
    FAVORITES,
    HEAD,
    MAX_ROWS,
    PARALLEL,
    PARALLEL_HEAD,
    RETOKENIZE,
    ROOMY,
    SmallEngine,
    Variant,
    greedy_text,
)

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_REQUESTS = 2 * MAX_ROWS
"""Most requests at a time, of which some have to wait."""

KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=1.0, seed=1),
    dict(temperature=0, stop_token_ids=FAVORITES[:2]),
    dict(temperature=0.7, seed=2, top_k=5),
    dict(temperature=1.0, seed=3, top_p=0.8, min_p=0.02, stop_token_ids=FAVORITES[2:3]),
    dict(temperature=0, presence_penalty=1.0, frequency_penalty=0.5),
    dict(temperature=0.9, seed=4, logit_bias={FAVORITES[0]: -100, 30: 7.0}, repetition_penalty=1.2),
    dict(temperature=0, allowed_token_ids=list(range(12, 60))),
    dict(temperature=1.0, seed=5, min_tokens=6, stop_token_ids=FAVORITES, extra_args={"num_speculative_tokens": 1}),
    dict(temperature=1.0),  # without a seed nobody knows what it says
]
UNKNOWN = KINDS[-1]
PLAIN = [{"temperature": 0}, {"temperature": 1.0, "seed": 1}]
"""Parameters for which a drafter that agrees with the target never makes a mistake."""


def asked(place: int) -> tuple[list[int], SamplingParams]:
    """Return prompt and parameters of a request from a fixed list. Two thirds share their beginning with others."""
    rng = random.Random(place)
    begin = random.Random(place % 3).choices(range(2, VOCAB), k=rng.randint(0, 24)) if place % 3 else []
    prompt = [*begin, *rng.choices(range(2, VOCAB), k=rng.randint(1, 20))]
    return prompt, SamplingParams(max_tokens=rng.randint(1, 18), **KINDS[place % len(KINDS)])


NUM_ASKED = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@cache
def said_alone(place: int, folder: Path) -> list[int] | None:
    prompt, params = asked(place)
    if KINDS[place % len(KINDS)] == UNKNOWN:
        return None
    engine = SmallEngine(Variant(num_blocks=ROOMY), folder)
    engine.add("alone", prompt, params)
    engine.finish()
    return engine.texts["alone"]


def test_single_greedy_request_matches_its_text(folder: Path) -> None:
    for place in range(0, NUM_ASKED, len(KINDS)):
        prompt, params = asked(place)
        assert said_alone(place, folder) == greedy_text(prompt, params.max_tokens)


class Schedules(RuleBasedStateMachine):
    def __init__(self, variant: Variant, folder: Path) -> None:
        super().__init__()
        self.engine = SmallEngine(variant, folder)
        self.folder = folder
        self.places: dict[str, int] = {}
        self.aborted: set[str] = set()

    @precondition(lambda self: len(self.engine.running) < MOST_REQUESTS)
    @rule(place=st.integers(0, NUM_ASKED - 1))
    def admit(self, place: int) -> None:
        name = f"{len(self.places)}"
        self.places[name] = place
        self.engine.add(name, *asked(place))

    @precondition(lambda self: self.engine.running)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
        self.check()

    @precondition(lambda self: self.engine.running)
    @rule(choice=st.integers(0, MOST_REQUESTS - 1))
    def abort(self, choice: int) -> None:
        name = self.engine.running[choice % len(self.engine.running)]
        self.engine.abort(name)
        self.aborted.add(name)

    @precondition(lambda self: self.engine.running)
    @rule()
    def interrupt(self) -> None:
        self.engine.interrupt()

    @precondition(lambda self: self.engine.running)
    @rule()
    def drain(self) -> None:
        self.engine.finish()
        self.check()

    def check(self) -> None:
        for name, place in self.places.items():
            text, alone = self.engine.texts[name], said_alone(place, self.folder)
            if alone is not None:
                assert text == alone[: len(text)], f"{name}, which asked for {KINDS[place % len(KINDS)]}"

    def teardown(self) -> None:
        self.engine.finish()
        self.check()
        for name in self.places.keys() - self.aborted:
            alone = said_alone(self.places[name], self.folder)
            assert alone is None or self.engine.texts[name] == alone


VARIANTS = [
    Variant(),
    Variant(overlap=True, v2=True),
    Variant("ngram_gpu", overlap=True),
    Variant("ngram_gpu", overlap=True, v2=True, backend=CapturingBackend, adaptive=True),
    Variant("draft_model", overlap=True),
    Variant("draft_model", overlap=True, backend=CompilingBackend, adaptive=True),
    Variant("suffix", backend=CompilingBackend),
    Variant("draft_model", overlap=False, v2=True, adaptive=True),
    Variant(PARALLEL, overlap=True, backend=CapturingBackend),
    Variant(PARALLEL, v2=True, adaptive=True),
    Variant("custom_class"),
    Variant("suffix", v2=True, adaptive=True),
    Variant(RETOKENIZE),
    Variant(BLOCK_DRAFTER, overlap=True),
    Variant(BLOCK_DRAFTER, v2=True, backend=CompilingBackend, adaptive=True),
    Variant(HEAD, overlap=True),
    Variant(HEAD, v2=True, backend=CompilingBackend, adaptive=True),
    Variant(PARALLEL_HEAD, overlap=True, adaptive=True),
    Variant(CHAIN, overlap=True, backend=CapturingBackend),
    Variant(CHAIN, v2=True, adaptive=True),
    Variant(ASSISTANT, overlap=True),
    Variant(num_snapshots=2),
    Variant("ngram_gpu", overlap=True, backend=CapturingBackend, num_snapshots=6),
    Variant("draft_model", overlap=True, v2=True, num_snapshots=60, adaptive=True),
    Variant(staged=True),
    Variant("ngram_gpu", staged=True, backend=CapturingBackend),
    Variant("suffix", staged=True, v2=True),
    Variant("draft_model", staged=True),
    Variant(HEAD, staged=True, v2=True, backend=CompilingBackend),
]


def explore(variant: Variant, folder: Path, **profile: Any) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    chosen = settings(deadline=None, database=None, suppress_health_check=checks, **profile)
    run_state_machine_as_test(lambda: Schedules(variant, folder), settings=chosen)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_random_schedules(variant: Variant, folder: Path) -> None:
    explore(variant, folder, max_examples=8, stateful_step_count=30, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_many_random_schedules(variant: Variant, folder: Path) -> None:
    """Schedules differ in every run. A failure prints how to repeat it."""
    explore(variant, folder, max_examples=400, stateful_step_count=60, print_blob=True)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_h10_h11_known_schedule_preempts_and_verifies(variant: Variant, folder: Path) -> None:
    """Random schedules consist of such events, so this shows that they occur."""
    engine = SmallEngine(variant, folder)
    for place in range(NUM_ASKED):
        engine.add(f"{place}", *asked(place))
    engine.finish()
    for place in range(NUM_ASKED):
        alone = said_alone(place, folder)
        assert alone is None or engine.texts[f"{place}"] == alone
    assert engine.num_preempted > 0
    if variant.method is not None:
        assert engine.num_verified > 0
    if variant.num_snapshots:
        assert engine.num_loaded >= engine.num_resumed > 0


RIGHT = ("draft_model", HEAD, CHAIN, ASSISTANT)
RIGHT_IF_GREEDY = (PARALLEL, PARALLEL_HEAD, BLOCK_DRAFTER)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.method in RIGHT + RIGHT_IF_GREEDY], ids=str)
def test_drafts_equal_to_the_target_are_always_accepted(variant: Variant, folder: Path) -> None:
    """The drafter's KV follows rows through shared blocks, chunks and preemptions. A rejected draft would mean that it
    was made from something other than the row's text."""
    engine, rng = SmallEngine(variant, folder), random.Random(0)
    plain = PLAIN if variant.method in RIGHT else PLAIN[:1]
    for index in range(40):
        prompt, _ = asked(rng.randrange(NUM_ASKED))
        engine.add(f"{index}", prompt, SamplingParams(max_tokens=rng.randint(2, 18), **rng.choice(plain)))
        for _ in range(rng.randint(0, 5)):
            engine.step()
        if index % 10 == 9:
            engine.interrupt()
    engine.finish()
    assert engine.num_accepted == engine.num_verified > (100 if variant.adaptive else 200)
