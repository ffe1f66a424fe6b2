"""Times of the parts of decoding, with drafts and without, on a named card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import GAUDIS, UNIVERSAL_DRAFT
from vllm_gaudi_spec.devices.common.expert_forms import GAUDI_OPERATOR_FROM
from vllm_gaudi_spec.drafting.table import DRAFT_MODEL, METHODS, Method, has_model
from vllm_gaudi_spec.tools.estimate.outline import Outline

if TYPE_CHECKING:
    from card_emulator.counters import Tally

# Forward, sampling, and a report, which is the step's one wait; drafting is one graph more.
_LAUNCHES = 3
# Methods whose drafter has files of its own.
_ESTIMATED: dict[str, Method] = {
    DRAFT_MODEL: METHODS[DRAFT_MODEL],
    UNIVERSAL_DRAFT: METHODS[DRAFT_MODEL],
    **{name: row for name, row in METHODS.items() if row.has_model and not row.in_target},
}


def _operator_from(card: str) -> int:
    """Tokens from which on its operator for experts is used: on CUDA always, where it is the faster one."""
    return GAUDI_OPERATOR_FROM if card in GAUDIS else 1


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, and how it is drafted for; without drafts, a target alone."""

    target: Outline
    method: str | None = None
    drafter: Outline | None = None
    num_drafts: int = 0

    @classmethod
    def of(cls, target: Path, method: str | None = None, drafter: Path | None = None, num_drafts: int = 0) -> Pair:
        model = Outline.of(target)
        if method is None or not (method == UNIVERSAL_DRAFT or has_model(method)):
            return cls(target=model, method=method, num_drafts=num_drafts)
        row = _ESTIMATED.get(method)
        if row is None:
            raise ValueError(
                f"there is no estimate of what {method} costs; give one of {', '.join(_ESTIMATED)}, or ngram"
            )
        if drafter is None:
            raise ValueError(f"an estimate of {method} reads the drafter's files; give its folder as model")
        outline = Outline.of(drafter, has_attention=row.has_kv)
        return cls(target=model, method=method, drafter=outline, num_drafts=num_drafts)

    def plain_s(self, batch: int, context: int, card: str) -> float:
        """A step without drafts."""
        return self._step(self.target.tally(batch, 1, context, operator_from=_operator_from(card)), card, batch)

    def verify_s(self, batch: int, context: int, card: str) -> float:
        """A step that verifies drafts, without the time to make them."""
        tally = self.target.tally(batch, 1 + self.num_drafts, context, operator_from=_operator_from(card))
        return self._step(tally, card, batch * (1 + self.num_drafts))

    def prompt_s(self, batch: int, tokens: int, card: str) -> float:
        """So many prompts at once, and their first tokens."""
        tally = self.target.tally_of_prompts(batch, tokens, operator_from=_operator_from(card))
        return self._step(tally, card, batch * tokens)

    def draft_s(self, batch: int, context: int, card: str) -> float:
        """A round of drafts. Methods without a model of their own are taken to cost nothing."""
        from card_emulator.cost import step_seconds
        from card_emulator.counters import Tally

        drafter = self.drafter
        if drafter is None:
            return 0.0
        assert self.method is not None
        row, work = _ESTIMATED[self.method], Tally(launches=1)
        if not row.has_kv:
            # All heads look at one state, each with a vocabulary of its own.
            work.add(Tally(bytes_moved=drafter.weight_bytes, flops=2 * batch * drafter.weights))
            return step_seconds(work, card, kernels_s=drafter.kernels_s(batch), width=drafter.width)
        # A draft model first reads two tokens a row; a head what was accepted, up to k + 1, in a graph of its own.
        work.launches += row.is_head
        borrowed = 0 if drafter.head_weights else self.target.head_weights
        first = self.num_drafts + 1 if row.is_head else 2
        kernels_s = 0.0
        for queries in (first, *[1] * (self.num_drafts - 1)):
            work.add(drafter.tally(batch, queries, context, borrowed=borrowed, operator_from=_operator_from(card)))
            kernels_s += drafter.kernels_s(batch * queries)
        return step_seconds(work, card, kernels_s=kernels_s, width=drafter.width)

    def speedup(self, batch: int, context: int, card: str, rate: float) -> float:
        """Over no drafts, where each draft after accepted ones is accepted at this rate."""
        length = sum(rate**position for position in range(self.num_drafts + 1))
        drafted = self.verify_s(batch, context, card) + self.draft_s(batch, context, card)
        return length * self.plain_s(batch, context, card) / drafted

    def memory(self, batch: int, context: int, card: str) -> int:
        """Bytes of weights, KV and copies of experts; what graphs and a step hold beside them is not known."""
        models = [self.target] if self.drafter is None else [self.target, self.drafter]
        copies = max(
            model.experts.gathered_bytes(batch * queries, _operator_from(card)) if model.experts else 0
            for model in models
            for queries in (1, 1 + self.num_drafts)
        )
        return copies + sum(model.memory + batch * context * model.kv_bytes for model in models)

    def _step(self, tally: Tally, card: str, tokens: int) -> float:
        from card_emulator.cost import step_seconds
        from card_emulator.counters import Tally

        tally.add(Tally(launches=_LAUNCHES, host_reads=1))
        return step_seconds(tally, card, kernels_s=self.target.kernels_s(tokens), width=self.target.width)
