"""Findings, which have one line each and a remedy. Only a problem prevents the platform or the models from running."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    severity: str
    about: str
    text: str
    remedy: str = ""


ok = partial(Finding, OK)
note = partial(Finding, NOTE)
warning = partial(Finding, WARNING)
problem = partial(Finding, PROBLEM)


def refusal(about: str, message: str) -> Finding:
    """Create a problem from a one-line error that ends with the remedy."""
    text, _, remedy = message.rpartition("; ")
    return problem(about, text or message, remedy if text else "")


def conclude(findings: list[Finding]) -> str:
    counts = {name: sum(found.severity == name for found in findings) for name in (PROBLEM, WARNING)}
    counted = " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)
    if not counts[PROBLEM]:
        return f"fine, with {counted}" if counted else "fine"
    first = next(found for found in findings if found.severity == PROBLEM)
    return f"{counted}; first: {'; '.join(filter(None, (first.text, first.remedy)))}"
