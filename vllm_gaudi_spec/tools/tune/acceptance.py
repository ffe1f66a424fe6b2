"""Acceptance: counted request by request, summed up as per-position rates and mean acceptance length.

Each number of drafts has a run of its own, which is exact for every method and rule. `shortened` estimates a smaller
number from a run with more drafts. It needs drafts that are a prefix of longer ones (greedy, coupled and looked-up
drafts, heads; not `suffix`, `slem`, or the rule `block`), and is a little low even there: with more drafts, rounds
begin after harder positions, since the easy ones were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gaudi_spec.config import REQUEST_OPTION

if TYPE_CHECKING:
    from vllm import LLM

_RESAMPLES = 2000


@dataclass(frozen=True)
class Counts:
    """Of one request, after its first token, which is the prompt's."""

    tokens: int
    steps: int
    """Of the target, those without drafts included."""
    accepted: tuple[int, ...]
    """For each step that had drafts, how many were accepted."""

    @classmethod
    def of(cls, completion: Any) -> Counts:
        """No step goes past the end, so each token that was not drafted is one step's."""
        metrics = completion.spec_decode_metrics
        accepted = () if metrics is None else tuple(metrics.per_step_accepted)
        tokens = len(completion.token_ids) - 1
        return cls(tokens, tokens - sum(accepted), accepted)


@dataclass(frozen=True)
class Acceptance:
    num_drafts: int
    """k, as requested."""
    requests: tuple[Counts, ...]

    @cached_property
    def steps(self) -> int:
        return sum(counts.steps for counts in self.requests)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per request and step of the target, steps without drafts included."""
        return sum(counts.tokens for counts in self.requests) / self.steps if self.steps else 1.0

    @property
    def mean_acceptance_length(self) -> float:
        """vLLM's metric, over steps with drafts: the accepted drafts and one token more. 1 without drafts."""
        accepted = [num for counts in self.requests for num in counts.accepted]
        return 1 + sum(accepted) / len(accepted) if accepted else 1.0

    @property
    def positions(self) -> tuple[float, ...]:
        """Per-position acceptance: the share of all steps in which the first i + 1 drafts were accepted."""
        accepted = [num for counts in self.requests for num in counts.accepted]
        return tuple(sum(num > i for num in accepted) / max(self.steps, 1) for i in range(self.num_drafts))

    @property
    def drafting(self) -> float:
        """The share of a request's steps that had drafts for it."""
        return sum(len(counts.accepted) for counts in self.requests) / max(self.steps, 1)

    def interval(self) -> tuple[float, float]:
        """95 % of `tokens_per_step`: a bootstrap over the requests."""
        tokens_N = np.array([counts.tokens for counts in self.requests], dtype=float)
        steps_N = np.array([counts.steps for counts in self.requests], dtype=float)
        num = len(self.requests)
        weights_SN = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), _RESAMPLES)
        low, high = np.percentile(weights_SN @ tokens_N / np.maximum(weights_SN @ steps_N, 1), [2.5, 97.5])
        return float(low), float(high)

    def verifying(self, batch: int) -> float:
        """The share of a batch's steps that verify: those in which any request has drafts. Requests are taken to
        have them independently of each other."""
        return 1 - (1 - self.drafting) ** batch

    def shortened(self, num_drafts: int) -> Acceptance:
        """As it would be with fewer drafts, in rounds that begin where these do."""
        if not 0 < num_drafts <= self.num_drafts:
            raise ValueError(f"a run with {self.num_drafts} drafts cannot show what {num_drafts} would do")
        requests = []
        for counts in self.requests:
            accepted = tuple(min(num, num_drafts) for num in counts.accepted)
            requests.append(replace(counts, accepted=accepted, tokens=counts.steps + sum(accepted)))
        return Acceptance(num_drafts, tuple(requests))


def ask(llm: LLM, prompts: list[list[int]], tokens: int, num_drafts: int, temperature: float = 0.0) -> list[Counts]:
    """Generate `tokens` tokens for each prompt, past any end token, with up to `num_drafts` drafts a step (0: none)."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={REQUEST_OPTION: num_drafts},
        )
        for seed in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [Counts.of(output.outputs[0]) for output in outputs]


def measure(llm: LLM, prompts: list[list[int]], tokens: int, num_drafts: int, temperature: float) -> Acceptance:
    return Acceptance(num_drafts, tuple(ask(llm, prompts, tokens, num_drafts, temperature)))
