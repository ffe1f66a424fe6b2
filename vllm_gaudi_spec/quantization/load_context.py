"""Between the runner, which loads models, and what measures or quantises them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """Where a model is loaded."""

    model: str
    """Its folder, or its name."""
    rank: int
    world: int
    """Ranks, each with files of its own."""
    fp8_range: str | None
    """Whose e4m3 numbers are simulated; None for those that the scales were made for."""
    apart: Collection[nn.Module] = ()
    """Parts of the model that are another one's too, and stay what they are."""


class Measuring(Protocol):
    """A model that is measured."""

    reads_logits: bool
    """Whether logits are asked of every token, so that what makes them is measured as well."""

    def counting(self, real_T: torch.Tensor) -> AbstractContextManager[None]:
        """Around a forward of T tokens, of which those count that are real."""
        ...

    def write(self) -> None:
        """Write all that was seen so far to the files, in place of what was there."""
        ...
