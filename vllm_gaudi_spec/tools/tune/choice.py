"""Which method and number of drafts give the highest throughput, by batch size, from acceptance and step costs.

Where steps are captured, one of k drafts verifies [B, k + 1] tokens whatever was drafted, and the drafter makes k. So
fewer drafts than k in `num_speculative_tokens_per_batch_size` would save nothing: for each batch size it has k, or 0.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_gaudi_spec.tools.tune.acceptance import Acceptance
from vllm_gaudi_spec.tools.tune.costs import StepCost, cost_at

MARGIN = 1.02
"""The smallest speedup that counts: two measurements of one thing differ by as much."""


@dataclass(frozen=True)
class Candidate:
    name: str
    """The drafter's name on the command line."""
    config: dict[str, Any]
    """`speculative_config` without the number of drafts."""
    acceptance: Acceptance
    costs: tuple[StepCost, ...]
    """By batch size, smallest first."""

    @property
    def num_drafts(self) -> int:
        return self.acceptance.num_drafts

    def step_s(self, batch: int) -> float:
        return cost_at(self.costs, batch).step_s(self.acceptance.verifying(batch))

    def speedup(self, batch: int) -> float:
        """Over no speculation, both measured on this candidate's engine."""
        return self.acceptance.tokens_per_step * cost_at(self.costs, batch).plain_s / self.step_s(batch)


@dataclass(frozen=True)
class Choice:
    candidates: tuple[Candidate, ...]
    batches: tuple[int, ...]
    max_num_seqs: int

    def best_at(self, batch: int) -> Candidate | None:
        """For a server with batches of this size only; None where speculation does not pay."""
        best = max(self.candidates, key=lambda candidate: candidate.speedup(batch))
        return best if best.speedup(batch) >= MARGIN else None

    @cached_property
    def chosen(self) -> Candidate | None:
        """For one server: the highest throughput over all batch sizes asked, each with the same weight, without drafts
        where they lose."""
        best = max(self.candidates, key=self._overall)
        return best if any(best.speedup(batch) >= MARGIN for batch in self.batches) else None

    def _overall(self, candidate: Candidate) -> float:
        return sum(math.log(max(candidate.speedup(batch), 1.0)) for batch in self.batches)

    def schedule(self) -> list[list[int]]:
        """`num_speculative_tokens_per_batch_size`: ranges of batch sizes, first and last of each, and their drafts."""
        if self.chosen is None:
            return [[1, self.max_num_seqs, 0]]
        return ranges([self.chosen.num_drafts * (self.chosen.speedup(size) >= 1) for size in self._sizes()])

    def _sizes(self) -> range:
        return range(1, self.max_num_seqs + 1)

    def plain_tokens_per_s(self, batch: int) -> float:
        """Throughput without speculation: the median over the candidates' engines."""
        plain = sorted(cost_at(candidate.costs, batch).plain_s for candidate in self.candidates)
        return batch / plain[len(plain) // 2]

    def speculative_config(self) -> dict[str, Any] | None:
        if self.chosen is None:
            return None
        config = {**self.chosen.config, "num_speculative_tokens": self.chosen.num_drafts}
        schedule = self.schedule()
        if any(drafts != self.chosen.num_drafts for _, _, drafts in schedule):
            config["num_speculative_tokens_per_batch_size"] = schedule
        return config

    def serve_arguments(self, model: str) -> list[str]:
        command = ["vllm", "serve", model, "--max-num-seqs", str(self.max_num_seqs)]
        config = self.speculative_config()
        return command if config is None else [*command, "--speculative-config", json.dumps(config)]

    def as_json(self, model: str) -> dict[str, Any]:
        return {
            "pays": self.chosen is not None,
            "method": self.chosen.name if self.chosen else None,
            "num_speculative_tokens": self.chosen.num_drafts if self.chosen else 0,
            "num_speculative_tokens_per_batch_size": self.schedule(),
            "speculative_config": self.speculative_config(),
            "serve_arguments": self.serve_arguments(model),
            "by_batch": [self._one_batch(batch) for batch in self.batches],
            "candidates": [self._one_candidate(candidate) for candidate in self.candidates],
        }

    def _one_batch(self, batch: int) -> dict[str, Any]:
        best = self.best_at(batch)
        return {
            "batch": batch,
            "plain_tokens_per_s": self.plain_tokens_per_s(batch),
            "method": best.name if best else None,
            "num_speculative_tokens": best.num_drafts if best else 0,
            "speedup": best.speedup(batch) if best else 1.0,
        }

    def _one_candidate(self, candidate: Candidate) -> dict[str, Any]:
        acceptance = candidate.acceptance
        return {
            "method": candidate.name,
            "num_speculative_tokens": candidate.num_drafts,
            "tokens_per_step": acceptance.tokens_per_step,
            "tokens_per_step_95": acceptance.interval(),
            "accepted_at": acceptance.positions,
            "steps_with_drafts": acceptance.drafting,
            "by_batch": [self._cost_of(candidate, batch) for batch in self.batches],
        }

    def _cost_of(self, candidate: Candidate, batch: int) -> dict[str, float]:
        cost, speedup = cost_at(candidate.costs, batch), candidate.speedup(batch)
        return {
            "batch": batch,
            "plain_ms": 1e3 * cost.plain_s,
            "verify_ms": 1e3 * cost.verify_s,
            "draft_ms": 1e3 * cost.draft_s,
            "speedup": speedup,
            "tokens_per_s": speedup * self.plain_tokens_per_s(batch),
        }


def choose(candidates: Sequence[Candidate], batches: Sequence[int], max_num_seqs: int | None = None) -> Choice:
    if not candidates or not batches:
        raise ValueError("there is nothing to choose from")
    sizes = tuple(sorted(set(batches)))
    return Choice(tuple(candidates), sizes, max_num_seqs or sizes[-1])


def ranges(drafts: Sequence[int]) -> list[list[int]]:
    """Drafts of batch sizes 1, 2, ... as [first, last, drafts], neighbours of one kind together."""
    found: list[list[int]] = []
    for size, num in enumerate(drafts, 1):
        if found and found[-1][2] == num:
            found[-1][1] = size
        else:
            found.append([size, size, num])
    return found


# ---- tables ---------------------------------------------------------------------------------------------


def tables(choice: Choice) -> str:
    """Acceptance by position, costs and speedups by batch size, as Markdown."""
    rows = []
    for candidate in choice.candidates:
        low, high = candidate.acceptance.interval()
        rows.append(
            [
                candidate.name,
                str(candidate.num_drafts),
                f"{candidate.acceptance.mean_acceptance_length:.2f}",
                f"{candidate.acceptance.tokens_per_step:.2f} [{low:.2f}, {high:.2f}]",
                f"{candidate.acceptance.drafting:.2f}",
                " ".join(f"{rate:.3f}" for rate in candidate.acceptance.positions),
            ]
        )
    lengths = ["mean acceptance length", "over all steps [95 %]"]
    header = ["method", "k", *lengths, "steps with drafts", "per-position acceptance rate, of all steps"]
    parts = [markdown(header, rows)]
    rows = []
    for batch in choice.batches:
        best = choice.best_at(batch)
        speed = choice.plain_tokens_per_s(batch)
        rows.append([str(batch), "none", "0", f"{1e3 * batch / speed:.1f}", "", "", f"{speed:.1f}", _mark(best, None)])
        for candidate in choice.candidates:
            cost = cost_at(candidate.costs, batch)
            speedup = candidate.speedup(batch)
            times = (f"{1e3 * seconds:.1f}" for seconds in (cost.plain_s, cost.verify_s, cost.draft_s))
            mark = _mark(best, candidate)
            rows.append(
                [
                    str(batch),
                    candidate.name,
                    str(candidate.num_drafts),
                    *times,
                    f"{speedup * speed:.1f}",
                    f"{speedup:.2f}{mark}",
                ]
            )
    header = ["batch", "method", "k", "plain ms", "verify ms", "draft ms", "tokens/s", "speedup"]
    return "\n\n".join([*parts, markdown(header, rows)])


def _mark(best: Candidate | None, candidate: Candidate | None) -> str:
    text = "1.00" if candidate is None else ""
    return f"{text} best" if best is candidate else text


def conclusion(choice: Choice, model: str) -> str:
    """What to do, and why, in a few lines."""
    chosen = choice.chosen
    command = shlex.join(choice.serve_arguments(model))
    if chosen is None:
        return (
            "Speculation does not pay on these prompts: at no batch size is any method and k "
            f"{100 * (MARGIN - 1):.0f} % faster than no speculation. Serve without it:\n{command}"
        )
    speedups = ", ".join(f"{max(chosen.speedup(batch), 1.0):.2f} at {batch}" for batch in choice.batches)
    lines = [f"Use {chosen.name} with k = {chosen.num_drafts}. Speedup over no speculation by batch size: {speedups}."]
    ranges = [(first, last) for first, last, drafts in choice.schedule() if not drafts]
    off = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    if off:
        lines.append(f"Drafting does not pay in batches of {', '.join(off)}; the schedule turns it off there.")
    return "\n".join([*lines, command])


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])
