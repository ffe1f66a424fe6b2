"""Between the runner, which loads models, and what measures or quantizes them."""

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
    """The model, rank and device for which weights are loaded."""

    model: str
    """Its folder, or its name."""
    rank: int
    world: int
    """Ranks, each with files of its own."""
    fp8_range: str | None
    """The card whose e4m3 range is simulated; None for that of the scales."""
    apart: Collection[nn.Module] = ()
    """Modules that stay as they are: those shared with another model, and latent attention's."""


class Measuring(Protocol):
    """A model that is measured."""

    reads_logits: bool
    """Whether logits are computed for every token, so that their layer is measured as well."""

    def counting(self, real_T: torch.Tensor) -> AbstractContextManager[None]:
        """Around a forward of T tokens, of which the real ones count."""
        ...

    def write(self) -> None:
        """Write all values so far to the files, over older ones."""
        ...
