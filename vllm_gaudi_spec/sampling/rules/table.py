"""Acceptance rules by name, with the facts that are needed before PyTorch is imported.

The function of a rule is `verify` in the module of this folder that has the rule's name; `registry.py` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass

STRICT, SYNTHETIC = "strict", "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRule:
    about: str
    """What it is for, in a few words."""
    needs_probs: bool = False
    """It reads the probabilities that drafts were drawn from. Without them (greedy or coupled drafting) the strict rule
    runs instead, which has the same distribution then."""
    in_vllm: bool = False
    """vLLM has this value of `rejection_sample_method`; others are added to its closed list."""


RULES = {
    STRICT: AcceptanceRule(about="the output is that of decoding without drafts, token for token"),
    "standard": AcceptanceRule(about="rejection sampling: exact in distribution", needs_probs=True, in_vllm=True),
    "block": AcceptanceRule(about="exact in distribution, and accepts more", needs_probs=True, in_vllm=True),
    SYNTHETIC: AcceptanceRule(about="for benchmarks: accepts at given rates, whatever the models output", in_vllm=True),
}
