"""What a drafter on the device reads besides the request state, and when."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_spec.attention.inputs import Blocks

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vllm_gaudi_spec.records import Batch, Drafts, Hidden, Request, SampleBatch


class Placed(NamedTuple):
    """Where the KV of a round of drafts stands."""

    context: int
    """As `Shapes` counts it for decodes."""
    blocks: Blocks


NOWHERE = Placed(0, Blocks((), ()))
"""Of a drafter without KV: one program for every context."""


class Reading:
    """Nothing: the request state is all that the drafter looks at. Others override what they need."""

    has_kv = False
    """Whether rounds of drafts read and write KV of the drafter's own."""
    every_step = False
    """Whether something is read behind each verification, drafts or no drafts."""

    # --- host ---

    def apply(self) -> None:
        """Requests came, in `requests.admitted`."""

    def follow(self, batch: Batch) -> None:
        """A batch that the target has computed."""

    def before_round(self, batch: SampleBatch, lengths_B: torch.Tensor, able_np: np.ndarray, placed: Placed) -> None:
        """Behind each verification. `able_np`: the most drafts that each request may have now."""

    def drafted(self, requests: list[Request], able_np: np.ndarray) -> None:
        """A round was run."""

    def missed(self, requests: list[Request]) -> None:
        """What was to be read of these was not, or nobody may rely on it."""

    def spoilt(self, requests: list[Request]) -> None:
        """Rounds of these gave drafts that could not be used: what was read may be what is wrong."""

    # --- device: parts of the sampling pass and of a round ---

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Rows have so many tokens now."""

    def able(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, wanted_B: torch.Tensor) -> torch.Tensor:
        """int32 [B]: of the drafts that are wanted, those that can be made of what was read."""
        return wanted_B

    def hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden | None:
        """What the first draft of each row follows from, for drafters that read hidden states."""
        return None

    def wrote(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        """Drafts and their KV were written."""

    # --- warm-up ---

    def signatures(self) -> Iterator[Hashable]:
        """Everything that is read, by shape; rounds aside."""
        yield from ()

    def read_padding(self) -> Iterator[tuple[int, int, int]]:
        """Rows, queries and context of what `before_round` may read in every step."""
        yield from ()

    def warm_up(self) -> None:
        """Run what changes the state alone."""
