"""The interfaces of this package: what a proposer gets and returns, and when drafting runs in a step.

Two kinds of proposers. A host proposer looks at token histories on the host, after a step's result was read. A device
proposer works on device tensors and never waits for the device, so that it fits between two steps of async scheduling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.records import Context, DraftRequest, Drafts, Hidden

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.attention.metadata import Inputs
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.records import Batch, DraftRound, Request, SampledRows, StepResult
    from vllm_gaudi_spec.runner.graphs import Job, StepRecorder
    from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
    from vllm_gaudi_spec.runner.kv_cache import KVCache
    from vllm_gaudi_spec.runner.model import LoadedModel
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes
    from vllm_gaudi_spec.sampling.params import Branch, Sampling


class HostProposer(Protocol):
    def propose(self, contexts: list[Context]) -> list[Sequence[int]]:
        """At most `max_drafts` drafts for each context, fewer or none where it has none."""
        ...

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop what is kept of these requests: they have ended. An id may come again with other tokens."""
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

    output_ids: torch.Tensor | None
    """int64: the target's ids that its logits cover; None where they cover the whole vocabulary, or another one."""

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        """[T, H]; KV of all T tokens is written. A head needs `carried_TH`, other models do not."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, V], in the model's dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingContext:
    """The parts of a loaded runner that drafting is built over."""

    speculation: Speculation
    vllm_config: VllmConfig
    requests: Requests
    recorder: StepRecorder
    shapes: Shapes
    kv_cache: KVCache
    hidden_states: HiddenStateBuffer
    """The hidden-state buffer of the target."""
    target: LoadedModel
    drafter: LoadedModel | None
    """None for methods without a model."""
    sampling: Sampling

    @property
    def device(self) -> torch.device:
        return self.requests.backend.traits.torch_device

    @property
    def max_rows(self) -> int:
        return self.requests.pad_row

    @property
    def max_model_len(self) -> int:
        return self.vllm_config.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        size: int = self.vllm_config.model_config.get_vocab_size()
        return size


class Drafting(ABC):
    """When and for whom the drafter runs: on the device between two steps, or on the host after a step's one read.

    Every kind leaves its drafts at the end of the rows' tokens, where the next step finds them, and reports to vLLM's
    scheduler what it may schedule. A default here does nothing: a kind overrides the events that concern it.
    """

    verifies_drafts = True
    """Whether a step reports how many drafts it verified."""
    reports_drafts = False
    """Whether `propose` drafts, so that the host may need drafts with the step's report."""
    lookahead = 0
    """Tokens after those of a decode for which its blocks have room, so that the drafter can read them too."""
    needs_rows_alone = False
    """Whether a drafter on the device reads rows without their blocks."""

    # --- the scheduler ---

    @abstractmethod
    def apply(self, requests: Requests) -> None:
        """Requests were admitted or ended: `requests.admitted`, `requests.ended`."""

    @abstractmethod
    def on_drafter_status(self, again: list[Request], never: list[Request], *, is_off: bool) -> None:
        """The scheduler's decision about faults, see `DrafterStatus`. With `is_off` it requests no drafts any more,
        which is all that drafters on the host need. On the device, steps in flight and reads without drafts have to
        stop as well."""

    def max_drafts(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        """int32: the most drafts that the device may have for each request, at most those that were scheduled."""
        return np.array(num_scheduled, dtype=np.int32)

    def outgrown(self) -> Collection[str]:
        """Requests without drafts in the newest step because their text exceeds a limit that only the drafter knows.
        Default: none."""
        return ()

    @abstractmethod
    def take_rounds(self) -> list[DraftRound]:
        """Rounds that the host has observed since the last call."""

    @abstractmethod
    def drafts_of(self, step: StepResult) -> DraftTokenIds:
        """The drafts that follow a step whose result is on the host."""

    def in_use(self) -> dict[str, int]:
        """Number of requests with state of the drafter's, by kind of state. Default: none."""
        return {}

    # --- a step ---

    def limit_drafts(self, requests: list[Request], max_drafts: int) -> Sequence[int]:
        """The most drafts that the scheduler requests of each request after this step, for drafters on the device."""
        return ()

    def host_drafts(self, requests: list[Request]) -> np.ndarray | None:
        """int32 [requests, 1 + K]: for each request the number of its drafts, and these, where they are made on the
        host: they are copied to the device with the step that verifies them."""
        return None

    def follow(self, batch: Batch) -> None:  # noqa: B027
        """The target has computed a batch. Default: no-op."""

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        """float32 [B, K, V]: the distributions of the rows' drafts. Default: None, no rule needs them."""
        return None

    def on_verified(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:  # noqa: B027
        """A part of the sampling pass, on the device: rows have `lengths_B` tokens now. Default: no-op."""

    def propose(self, sampled: SampledRows, branch: Branch, max_drafts: int) -> bool:
        """Draft on the device, after the verification: at most `max_drafts` a row. Return whether there was a round;
        default: no, drafts follow when the host has read the step."""
        return False

    def propose_on_host(self, step: StepResult, max_drafts: int) -> None:  # noqa: B027
        """Drafts on the host, after the read of a step. Default: no-op."""

    # --- warm-up ---

    def jobs(self) -> Iterator[Job]:
        """Warm-up of every graph that drafting may run. Default: none."""
        yield from ()


class NoDrafting(Drafting):
    """Drafting of an engine without speculation."""

    verifies_drafts = False

    def apply(self, requests: Requests) -> None:
        pass

    def on_drafter_status(self, again: list[Request], never: list[Request], *, is_off: bool) -> None:
        pass

    def take_rounds(self) -> list[DraftRound]:
        return []

    def drafts_of(self, step: StepResult) -> DraftTokenIds:
        return DraftTokenIds([], [])
