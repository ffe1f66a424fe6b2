"""What a drafter is asked and what it answers.

Two kinds. A host proposer looks at token histories on the host, after a step's result was read. A device proposer
works on device tensors and never waits for the device, so that it fits between two steps that overlap.

B rows of a batch, K drafts at most, R rows of the request state, M tokens of history, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vllm_gaudi_spec.attention.inputs import Blocks, Inputs
    from vllm_gaudi_spec.sampling.drafts import Drafted


@dataclass(frozen=True, slots=True)
class Context:
    """A request that may draft, as the host knows it."""

    req_id: str
    tokens_np: np.ndarray
    """int32 [n]: prompt and outputs. A view that is valid during the call only."""
    num_prompt: int
    num_wanted: int
    """At least 1: the most drafts that this request has use for."""


class Hidden(NamedTuple):
    """Hidden states behind tokens: a model's answer."""

    last: torch.Tensor
    """What logits are made of."""
    carried: torch.Tensor | None = None
    """What a head reads of them, beside the token that follows; often the same."""


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


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The rows of a step, on the device. Padding has the pad row and `num_wanted` 0."""

    rows_B: torch.Tensor
    """int64: rows of the request state."""
    history_RM: torch.Tensor
    """int32: prompt and outputs of every row; what stands behind a row's length is not to be read."""
    lengths_B: torch.Tensor
    """int32: how many tokens of a row are known, the newest included."""
    num_wanted_B: torch.Tensor
    """int32: the most drafts that a row has use for, 0 to K."""
    num_drafts: int
    """K."""
    blocks: Blocks
    """The rows' KV blocks, with room for the drafts of all but the last place; none where the drafter keeps no KV."""
    choose: Callable[[torch.Tensor, torch.Tensor], Drafted]
    """From a drafter's logits [B, V] in the target's ids, which it may change, and the positions [B] behind which they
    stand, to drafts: as the configuration says, with the rows' temperatures and filters."""
    hidden: Hidden | None = None
    """[B, H]: what each row's first draft follows from, for drafters that read hidden states."""


FAULTY = -1
"""In place of a row's number of drafts: there are none, for what was drafted can not be used."""
UNVERIFIED = -2
"""In place of how many of a row's drafts a step verified: it had some, and a grammar or the scheduler let none be."""


class Drafts(NamedTuple):
    tokens_BK: torch.Tensor
    """int32; behind a row's `num_drafts` anything that is a token."""
    num_drafts_B: torch.Tensor
    """int32: at most `num_wanted_B`."""
    probs_BKV: torch.Tensor | None = None
    """float32: the law each draft was drawn from, where drafting is probabilistic."""
    sound_BK: torch.Tensor | None = None
    """bool: whether the logits that each draft was chosen from were numbers; None where there were none."""

    @property
    def known(self) -> Drafts:
        """As the host may read them: a row with a fault has no drafts."""
        return Drafts(self.tokens_BK, self.num_drafts_B.clamp(min=0))


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
