"""Adaptive verification on a simulated machine, whose costs and acceptance rates are known, and in schedulers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from tests.support.schedulers import NUM_DRAFTS, PROMPT, Chooses, answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.outputs import CountedOutput
from vllm_gaudi_spec.records import WorkerCounts
from vllm_gaudi_spec.scheduling.adaptive import Acceptance, StepTimes
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler

SIZES = [1, 2, 4, 8, 16]
# Seconds of a step by the number of drafts per row.
LARGE_MODEL = {0: 1.0, 1: 1.25, 3: 1.45, 7: 1.9}
ONE_ROUND = {0: 1.0, 1: 1.3, 3: 1.32, 7: 1.4}
SMALL_MODEL = {0: 1.0, 1: 1.6, 3: 2.6, 7: 4.5}
MACHINES = [LARGE_MODEL, ONE_ROUND, SMALL_MODEL]

Rates = Callable[[int], dict[str, float]]
"""Maps a step to the acceptance rate of each running request."""


@dataclass
class Machine:
    """Runs steps. Each verifies the number of drafts that was chosen when the step before was scheduled."""

    costs: dict[int, float]
    warmed: dict[int, float] | None = None
    """The costs that warm-up measured. Default: the true ones."""
    noise: float = 0.1
    seconds: float = 0.0
    num_tokens: int = 0
    choices: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.acceptance, self.times = Acceptance(max(self.costs)), StepTimes(SIZES, [*self.costs])
        warmed = self.costs if self.warmed is None else self.warmed
        if warmed:
            self.times.start_from({size: [*warmed.values()] for size in SIZES})
        self.rng = random.Random(0)

    def run(self, num_steps: int, rates: Rates, fixed: int | None = None) -> float:
        """Return the tokens per second."""
        seconds_before, tokens_before = self.seconds, self.num_tokens
        drafts, last = self.choices[-1] if self.choices else 0, (0, -1, -1)
        for step in range(num_steps):
            rows = rates(step)
            self.acceptance.forget(self.acceptance._by_id.keys() - rows.keys())
            expected = self.acceptance.expect_tokens(dict.fromkeys(rows, max(self.costs)))
            chosen = self.times.choose(len(rows), expected) if fixed is None else fixed
            seconds, num_tokens = self.costs[drafts] * (1 + self.noise * self.rng.random()), 0
            for name, rate in rows.items():
                accepted = 0
                while accepted < drafts and self.rng.random() < rate:
                    accepted += 1
                num_tokens += 1 + accepted
                if drafts:
                    self.acceptance.observe(name, drafts, accepted)
            if not drafts:
                self.acceptance.observe_idle(rows)
            now = len(rows), drafts, chosen
            if now == last and drafts == chosen:
                self.times.observe(len(rows), drafts, seconds)
            self.seconds += seconds
            self.num_tokens += num_tokens
            self.choices.append(chosen)
            last, drafts = now, chosen
        return (self.num_tokens - tokens_before) / (self.seconds - seconds_before)


def constant(rate: float, num_rows: int) -> Rates:
    return lambda step: {f"{row}": rate for row in range(num_rows)}


def alternating(*rates: float, length: int = 200) -> Rates:
    """Return one request after another, each with the next rate."""
    return lambda step: {f"{step // length}": rates[step // length % len(rates)]}


def find_best(costs: dict[int, float], rates: Rates, num_steps: int) -> float:
    """Return the tokens per second of the best fixed number of drafts."""
    return max(Machine(costs).run(num_steps, rates, fixed=num_drafts) for num_drafts in costs)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("costs", MACHINES, ids=["large", "one-round", "small"])
def test_adaptive_is_at_most_three_percent_slower_than_best_choice(
    costs: dict[int, float], rate: float, num_rows: int
) -> None:
    rates = constant(rate, num_rows)
    assert Machine(costs).run(1000, rates) > 0.97 * find_best(costs, rates, 1000)


WRONG = {
    "none": {},
    "too short": ONE_ROUND,
    "all too long": {num: 5 * seconds for num, seconds in SMALL_MODEL.items()},
    "overhead": {num: seconds - 0.7 for num, seconds in SMALL_MODEL.items()},
}


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("warmed", WRONG.values(), ids=WRONG)
def test_steps_correct_the_times_of_warm_up(warmed: dict[int, float], rate: float) -> None:
    rates = constant(rate, 4)
    machine = Machine(SMALL_MODEL, warmed)
    machine.run(100, rates)
    assert machine.run(3000, rates) > 0.97 * find_best(SMALL_MODEL, rates, 3000)


@pytest.mark.parametrize(("number", "rate"), [(0, 0.1), (1, 0.3), (7, 0.95)])
def test_number_that_looked_slow_in_warm_up_runs_again(number: int, rate: float) -> None:
    costs, rates = MACHINES[0 if number else 2], constant(rate, 4)
    machine = Machine(costs, costs | {number: 1.6 * costs[number]})
    machine.run(5000, rates)
    assert number in machine.choices[-1000:]
    assert machine.run(3000, rates) > 0.97 * find_best(costs, rates, 3000)


def test_noise_of_running_choices_does_not_slow_the_others() -> None:
    times = StepTimes([1], [0, 1, 2])
    times.start_from({1: [1.0, 1.0, 1.0]})
    rng = random.Random(0)
    for run in range(200):
        for _ in range(20):
            times.observe(1, 1 + run % 2, 1 + 0.3 * rng.random())
    assert times.choose(1, np.array([1.2, 1.0, 1.0])) == 0


def run_noisy(
    costs: list[float], tokens: list[float], num_steps: int, noise: Callable[[random.Random, int], float], seed: int
) -> float:
    """Return the tokens per second relative to the best choice."""
    times, rng = StepTimes([16], [*range(len(costs))]), random.Random(seed)
    times.start_from({16: [0.9 * seconds for seconds in costs]})
    num_tokens = total = 0.0
    for step in range(num_steps):
        chosen = times.choose(16, np.array(tokens))
        times.observe(16, chosen, costs[chosen] * noise(rng, step))
        num_tokens, total = num_tokens + tokens[chosen], total + costs[chosen]
    return num_tokens / total / max(count / seconds for count, seconds in zip(tokens, costs, strict=True))


def draw_burst(rng: random.Random, step: int) -> float:
    """Make a quarter of the steps much longer, as on a busy CPU."""
    return rng.uniform(1.3, 2) if rng.random() < 0.25 else rng.gauss(1, 0.05)


def draw_hiccup(rng: random.Random, step: int) -> float:
    return rng.gauss(1, 0.02) * (1.8 if 100 <= step < 108 else 1)


def draw_normal(rng: random.Random, step: int) -> float:
    return rng.gauss(1, 0.05)


@pytest.mark.parametrize(
    ("costs", "tokens", "noise", "lowest"),
    [
        ([1.0, 1.9, 2.6], [1.0, 1.6, 2.0], draw_burst, 0.95),
        ([1.0, 1.25, 1.5], [1.0, 1.6, 1.75], draw_hiccup, 0.95),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 0.9, 0.9, 0.9, 0.9], draw_normal, 0.98),
    ],
    ids=["bursts", "hiccup", "similar choices"],
)
def test_noise_does_not_hide_the_best_choice(
    costs: list[float], tokens: list[float], noise: Callable[[random.Random, int], float], lowest: float
) -> None:
    found = [run_noisy(costs, tokens, 1500, noise, seed) for seed in range(10)]
    assert sum(found) / len(found) > lowest


def test_pause_does_not_replace_the_time_of_the_choice_that_it_hit() -> None:
    """Four long steps in a row end the trust in all means, but the old ones stay until steps replace them."""
    times, tokens_J, costs = StepTimes([1], [0, 1]), np.array([1.0, 1.6]), [1.0, 1.25]
    times.start_from({1: costs})
    for num_drafts in (0, 1):
        for _ in range(40):
            times.observe(1, num_drafts, costs[num_drafts])
    for _ in range(4):
        times.observe(1, 1, 2.5)
    assert times.choose(1, tokens_J) == 1
    for _ in range(2):
        times.observe(1, 1, 2.5)
    assert times.choose(1, tokens_J) == 0, "they were no pause"


def test_size_without_steps_learns_from_the_nearest_size() -> None:
    """The nearest size is the one with the smallest ratio of rows, not the smallest difference."""
    sizes, tokens_J = [1, 8, 16, 32], np.array([1.0, 1.6])
    times = StepTimes(sizes, [0, 1])
    times.start_from({size: [1.0, 1.4] for size in sizes})
    for size, seconds in ((1, 1.4), (32, 2.0)):
        for _ in range(40):
            times.observe(size, 0, 1.0)
            times.observe(size, 1, seconds)
    assert [times.choose(size, tokens_J) for size in sizes] == [1, 0, 0, 0]


def test_size_without_warm_up_is_not_bound_to_another_size() -> None:
    times, tokens_J = StepTimes([1, 2], [0, 1]), np.array([1.0, 1.9])
    for size, costs, best in ((1, [0.010, 0.016], 1), (2, [0.010, 0.030], 0)):
        for _ in range(200):
            chosen = times.choose(size, tokens_J)
            times.observe(size, chosen, costs[chosen])
        assert chosen == best


def test_choice_that_a_limit_excluded_for_long_does_not_slow_the_others() -> None:
    times, tokens_J = StepTimes([1], [0, 1, 3]), np.array([0.0, 1.5, 1.6, 1.7])
    times.start_from({1: [1.0, 1.2, 1.6]})
    for num_drafts, num_steps in ((3, 20), (1, 20_000), (3, 20)):
        for _ in range(num_steps):
            times.observe(1, num_drafts, {1: 1.2, 3: 1.6}[num_drafts])
    assert times.choose(1, tokens_J) == 1


@pytest.mark.parametrize(("costs", "gain"), [(LARGE_MODEL, 1.1), (SMALL_MODEL, 1.15)], ids=["large", "small"])
def test_adaptive_is_faster_than_best_choice_if_requests_differ(costs: dict[int, float], gain: float) -> None:
    rates = alternating(0.1, 0.9)
    assert Machine(costs).run(4000, rates) > gain * find_best(costs, rates, 4000)


def test_longer_contexts_make_more_drafts_worthwhile() -> None:
    """They add as much to a step of every choice."""
    machine = Machine(dict(SMALL_MODEL))
    machine.run(300, constant(0.7, 4))
    assert 7 not in machine.choices[-100:]
    machine.costs.update({num: seconds + 30 for num, seconds in SMALL_MODEL.items()})
    machine.run(300, constant(0.7, 4))
    assert machine.choices[-100:].count(7) > 90
    machine.costs.update(SMALL_MODEL)
    machine.run(300, constant(0.7, 4))
    assert 7 not in machine.choices[-100:]


@pytest.mark.parametrize("num_steps", [0, 100])
def test_pause_does_not_change_the_choice(num_steps: int) -> None:
    machine = Machine(LARGE_MODEL)
    if num_steps:
        machine.run(num_steps, constant(0.9, 1))
    machine.costs = dict.fromkeys(LARGE_MODEL, 100.0)
    machine.run(3, constant(0.9, 1))  # the third is measured
    machine.costs = LARGE_MODEL
    machine.run(200, constant(0.9, 1))
    assert machine.choices[-100:].count(7) > 90, "others run again now and then"


def test_times_of_warm_up_replace_those_measured_before_they_arrive() -> None:
    times = StepTimes([1], [0, 1])
    tokens_J = np.array([1.0, 1.9])
    for _ in range(9):
        times.observe(1, 1, 4.0)
    assert times.choose(1, tokens_J) == 0, "it was never measured"
    times.start_from({1: [1.0, 1.2]})
    assert times.choose(1, tokens_J) == 1
    for _ in range(9):
        times.observe(1, 1, 4.0)
    times.start_from({1: [1.0, 1.2]})  # with each step's output
    assert times.choose(1, tokens_J) == 0, "it does not undo what was measured"


def test_expected_tokens_use_each_requests_own_acceptance() -> None:
    acceptance = Acceptance(3)
    for _ in range(300):
        acceptance.observe("good", 3, 3)
        acceptance.observe("bad", 3, 0)
    good, bad = (acceptance.expect_tokens({name: 3}) for name in ("good", "bad"))
    assert good[0] == bad[0] == 1
    assert good[3] > 3.5
    assert bad[3] < 1.3
    both = acceptance.expect_tokens({"good": 3, "bad": 3})
    assert both == pytest.approx(good + bad)
    assert acceptance.expect_tokens({"good": 1})[3] == pytest.approx(good[1]), "it may have one draft"


Kind = type[SpecScheduler | SpecAsyncScheduler]
KINDS = [SpecScheduler, SpecAsyncScheduler]


def adaptive(kind: Kind, folder: Path, chosen: int | None = None) -> Any:
    """Return a scheduler with requests `a` and `b`, which chooses `chosen` drafts if given."""
    upstream.apply()
    scheduler: Any = scheduler_of(kind, folder, speculative=dict(enable_adaptive_verification=True))
    for name in "ab":
        scheduler.add_request(Request(name, PROMPT, SamplingParams(max_tokens=200), None))
    if chosen is not None:
        scheduler._step_times = Chooses(chosen)
    return scheduler


@pytest.mark.parametrize("num_drafts", [0, 1, NUM_DRAFTS])
@pytest.mark.parametrize("kind", KINDS)
def test_next_step_has_as_many_positions_as_were_chosen(kind: Kind, num_drafts: int, tmp_path: Path) -> None:
    scheduler = adaptive(kind, tmp_path, num_drafts)
    first = scheduler.schedule()
    assert first.num_spec_tokens_to_schedule == num_drafts
    if issubclass(kind, AsyncScheduler):
        positions = scheduler.schedule().scheduled_spec_decode_tokens
        assert [len(positions.get(name, ())) for name in "ab"] == [num_drafts] * 2


@pytest.mark.parametrize(("accepted", "chosen"), [(NUM_DRAFTS, NUM_DRAFTS), (0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_changes_the_choice(kind: Kind, accepted: int, chosen: int, tmp_path: Path) -> None:
    scheduler = adaptive(kind, tmp_path)
    worked = WorkerCounts(0, 0, 0, {}, step_times={2: [1.0, 1.5, 2.5]})
    scheduler.update_from_output(
        scheduler.schedule(), CountedOutput(["a", "b"], {"a": 0, "b": 1}, [[1], [1]], worked=worked)
    )
    for _ in range(200):
        for name in "ab":
            scheduler._acceptance.observe(name, NUM_DRAFTS, accepted)
    assert scheduler.schedule().num_spec_tokens_to_schedule == chosen


@pytest.mark.parametrize("kind", KINDS)
def test_decode_after_a_prompt_is_measured(kind: Kind, tmp_path: Path) -> None:
    """Hardly any decode follows another one if requests are short."""
    scheduler = adaptive(kind, tmp_path, 0)
    num_observed = []
    for _ in range(3):
        scheduled = scheduler.schedule()
        scheduler.update_from_output(scheduled, answer({"a": [1], "b": [1]}, {"a": 0, "b": 0}))
        num_observed.append(len(scheduler._step_times.observed))
    assert num_observed == [0, 1, 2]


@pytest.mark.parametrize(("max_tokens", "chosen"), [(2, 0), (3, 1), (20, NUM_DRAFTS)])
def test_no_more_drafts_than_the_request_can_use(max_tokens: int, chosen: int, tmp_path: Path) -> None:
    scheduler: Any = scheduler_of(SpecScheduler, tmp_path, speculative=dict(enable_adaptive_verification=True))
    scheduler.add_request(Request("a", PROMPT, SamplingParams(max_tokens=max_tokens), None))
    scheduler._step_times.start_from({1: [1.0, 1.1, 1.2, 1.3]})
    scheduler._acceptance.expect_tokens = lambda max_drafts: np.minimum(np.arange(NUM_DRAFTS + 1), max_drafts["a"]) + 1
    assert scheduler.schedule().num_spec_tokens_to_schedule == chosen


def test_pause_is_not_a_long_step() -> None:
    """Long steps make more drafts worthwhile."""
    times, tokens_J = StepTimes([1], [0, 1]), np.array([1.0, 1.5])
    times.start_from({1: [1.0, 2.0]})
    for seconds in (1.0, 1.0, 100.0):
        times.observe(1, 0, seconds)
    assert times.choose(1, tokens_J) == 0
