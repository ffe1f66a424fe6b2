"""Records between the runner, which loads models, and the modules that measure or quantize them."""

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
    """The model's folder or name."""
    rank: int
    world: int
    """The number of ranks, each with its own files."""
    fp8_range: str | None
    """The card whose e4m3 range is simulated, or None for that of the scales."""
    apart: Collection[nn.Module] = ()
    """Modules that are left unchanged: those shared with another model, and latent attention's."""


class Measuring(Protocol):
    """A model that is being measured."""

    reads_logits: bool
    """Whether logits are computed for every token, so that their layer is measured too."""

    def counting(self, real_T: torch.Tensor) -> AbstractContextManager[None]:
        """Measure the real tokens of a forward of T tokens in this context."""
        ...

    def write(self) -> None:
        """Write all values so far, replacing older files."""
        ...
