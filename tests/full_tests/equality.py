"""What "equal" means (design, "What 'equal' means"): the same tokens, or at the first difference a tie.

Kernels for one row and for several round differently, so where two candidates' scores lie within `TIE` of each other
either may win. Behind a tie the two runs have different contexts and there is nothing left to compare. Ties are counted
and reported, never silently dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TIE = 1e-4


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """Position of the first difference; a list that merely ends earlier differs at its end."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


@dataclass
class Tally:
    """Collects the verifications of many comparisons; `check` fails with all differences at once."""

    equal: int = 0
    ties: int = 0
    different: list[str] = field(default_factory=list)

    def compare(
        self,
        name: str,
        ours: Sequence[int],
        reference: Sequence[int],
        scores_at: Callable[[int], Sequence[float] | torch.Tensor] | None = None,
    ) -> None:
        """`scores_at(i)`: every candidate's score at position i, given the tokens before it that both runs share.

        Without it no difference counts as a tie.
        """
        position = first_difference(ours, reference)
        if position is None:
            self.equal += 1
            return
        here = f"{name}: differs at {position}: {ours[position:][:4]} for {reference[position:][:4]}"
        if scores_at is None or position >= min(len(ours), len(reference)):
            self.different.append(here)
            return
        scores = scores_at(position)
        gap = abs(float(scores[ours[position]]) - float(scores[reference[position]]))
        if gap <= TIE:
            self.ties += 1
        else:
            self.different.append(f"{here}, scores {gap:.2e} apart")

    def greedy(self, name: str, ours: Sequence[int], logits_TV: torch.Tensor) -> None:
        """`logits_TV[i]`: the reference's logits after the prompt and `ours[:i]`. Goes on behind a tie."""
        chosen = logits_TV.gather(1, torch.tensor(ours)[:, None])[:, 0]
        behind = logits_TV.max(dim=1).values - chosen
        wrong = (behind > TIE).nonzero()[:, 0].tolist()
        if wrong:
            position = wrong[0]
            best = int(logits_TV[position].argmax())
            self.different.append(
                f"{name}: {ours[position]} at {position}, reference {best}, {float(behind[position]):.2e} better"
            )
        elif bool((behind > 0).any()):
            self.ties += 1
        else:
            self.equal += 1

    def check(self) -> None:
        print(f"{self.equal} equal, {self.ties} ties within {TIE}, {len(self.different)} different")
        assert not self.different, "\n".join(self.different)
