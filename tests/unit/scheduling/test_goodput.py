"""The rule that stops drafting where it loses, on a made-up machine whose costs are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from vllm_gaudi_spec.scheduling.goodput import Goodput


@dataclass
class Machine:
    """Steps cost so much and yield so much; each goes the way that was chosen when the one before was scheduled."""

    goodput: Goodput
    drafted_s: float
    tokens: float
    plain_s: float = 1.0
    noise: float = 0.0
    catch_up_s: float = 0.0
    seconds: float = 0.0
    num_tokens: float = 0.0
    modes: list[bool] = field(default_factory=list)

    def run(self, steps: int, rows: int = 4) -> float:
        """Tokens a second of each row."""
        rng = random.Random(steps)
        seconds_before, tokens_before = self.seconds, self.num_tokens
        drafted = self.modes[-1] if self.modes else False
        last = None
        for _ in range(steps):
            drafts = self.goodput.should_draft(rows)
            seconds = self.drafted_s if drafted else self.plain_s
            seconds *= 1 + self.noise * rng.random()
            if drafts and not drafted:
                seconds += self.catch_up_s
            tokens = int(self.tokens) + (rng.random() < self.tokens % 1) if drafted else 1
            self.goodput.observe(rows, drafted, seconds, rows * tokens, steady=last == (drafted, drafts))
            self.seconds += seconds
            self.num_tokens += tokens
            self.modes.append(drafts)
            last, drafted = (drafted, drafts), drafts
        return (self.num_tokens - tokens_before) / (self.seconds - seconds_before)


def test_drafting_continues_if_faster() -> None:
    machine = Machine(Goodput([1, 2, 4]), drafted_s=1.5, tokens=2.5)
    machine.run(500)
    assert machine.run(5000) > 0.985 * 2.5 / 1.5
    assert sum(machine.modes[-1000:]) > 900


def test_drafting_ends_if_slower() -> None:
    machine = Machine(Goodput([1, 2, 4]), drafted_s=2.0, tokens=1.5)
    machine.run(500)
    assert machine.run(5000) > 0.985
    assert sum(machine.modes[-1000:]) < 100


@pytest.mark.parametrize("drafted_s", [0.8, 1.0, 1.3, 1.45, 1.55, 1.7, 2.5, 6.0])
@pytest.mark.parametrize("catch_up_s", [0.0, 5.0])
def test_trials_cost_at_most_three_percent(drafted_s: float, catch_up_s: float) -> None:
    machine = Machine(Goodput([4]), drafted_s=drafted_s, tokens=1.5, noise=0.3, catch_up_s=catch_up_s)
    plain = Machine(Goodput([4]), drafted_s=1e9, tokens=1.5, noise=0.3)
    plain.goodput._at(4).drafting, plain.goodput._at(4).wait = False, 1e9
    machine.run(300)
    assert machine.run(20000) > 0.97 * plain.run(20000)


def test_drafting_resumes_when_it_becomes_faster() -> None:
    machine = Machine(Goodput([4]), drafted_s=2.0, tokens=1.2)
    machine.run(1000)
    assert not machine.modes[-1]
    machine.tokens = 4.0
    machine.run(3000)
    assert machine.modes[-1]
    machine.tokens = 1.2
    machine.run(3000)
    assert not machine.modes[-1]


def test_new_batch_size_starts_like_the_nearest_one() -> None:
    goodput = Goodput([1, 2, 4, 8, 16])
    small, large = (Machine(goodput, drafted_s=cost, tokens=2.0) for cost in (1.2, 4.0))
    small.run(300, rows=1)
    large.run(300, rows=16)
    assert [goodput.should_draft(rows) for rows in (1, 2, 8, 9, 16)] == [True, True, False, False, False]
    small.run(300, rows=1)
    assert small.modes[-1]


def test_stale_measurements_are_dropped() -> None:
    """Contexts have grown: what was fast is slow, whatever was measured then."""
    goodput = Goodput([1, 4])
    machine = Machine(goodput, drafted_s=0.01, plain_s=0.02, tokens=1.0)
    machine.run(400)
    assert machine.modes[-1]
    Machine(goodput, drafted_s=0.01, plain_s=0.02, tokens=1.0).run(200, rows=1)
    goodput._at(4).wait = 0
    goodput.observe(4, True, 0.25, 4, steady=True)
    assert not goodput._at(4).on_trial, "a trial beside steps of long ago"
    later = Machine(goodput, drafted_s=0.25, plain_s=0.19, tokens=1.0)
    later.run(700)
    assert not later.modes[-1]


def test_pause_during_trial_is_not_charged_to_its_mode() -> None:
    machine = Machine(Goodput([4]), drafted_s=2.0, tokens=1.2)
    machine.run(300)
    size = machine.goodput._at(4)
    size.wait = 1
    machine.run(3)
    assert size.on_trial
    machine.goodput.observe(4, True, 600.0, 4, steady=False)
    machine.run(40)
    assert 0 < size.wait < 20000


def test_trial_ends_if_its_mode_never_runs() -> None:
    """Somebody else wants no drafts at all."""
    goodput = Goodput([4])
    for _ in range(200):
        goodput.observe(4, False, 1.0, 4, steady=True)
    size = goodput._at(4)
    size.drafting, size.wait = False, 1
    for _ in range(200):
        goodput.observe(4, False, 1.0, 4, steady=True)
        assert size.trial_steps <= 64
    assert not size.on_trial or size.trial_steps < 64


def test_equal_modes_do_not_flap() -> None:
    machine = Machine(Goodput([4]), drafted_s=1.5, tokens=1.5, noise=0.1)
    machine.run(5000)
    changes = sum(before != after for before, after in zip(machine.modes, machine.modes[1:], strict=False))
    assert changes < 5000 / 64 * 2 + 4, "a trial has a beginning and an end"
