"""What a drafter is asked and what it answers.

Two kinds. A host proposer looks at token histories on the host, after a step's result was read. A device proposer
works on device tensors and never waits for the device, so that it fits between two steps that overlap.

B rows of a batch, K drafts at most, R rows of the request state, M tokens of history, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_gaudi_spec.records import Context, DraftRequest, Drafts, Hidden

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.attention.inputs import Inputs


class HostProposer(Protocol):
    def propose(self, contexts: list[Context]) -> list[Sequence[int]]:
        """At most `num_wanted` drafts for each context, fewer or none where there is nothing to say."""
        ...

    def forget(self, req_ids: Iterable[str]) -> None:
        """These requests have ended; an id may come again with other tokens."""
        ...

    @property
    def num_remembered(self) -> int:
        """Requests of which something is kept until they are forgotten."""
        ...


class DeviceProposer(Protocol):
    """Static shapes, no wait for the device."""

    def propose(self, request: DraftRequest) -> Drafts: ...


class Model(Protocol):
    """A loaded model."""

    said: torch.Tensor | None
    """int64: the target's ids of what it can say; None where that is everything, or the vocabulary is another."""

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        """[T, H]; KV of all T tokens is written. A head wants what was carried to it, other models nothing."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, V]."""
        ...
