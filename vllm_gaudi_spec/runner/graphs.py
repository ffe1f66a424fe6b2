"""Signatures of steps: the jobs that warm-up makes them with, and the recorder that proves that none came after it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from vllm_gaudi_spec.records import WorkerCounts

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend

logger = init_logger(__name__)

_ASK_EVERY = 16
"""Steps between two looks at the device's own count of programs: what a look costs is its bridge's affair."""


class Job(NamedTuple):
    """A run of warm-up on padding, through the functions that serve requests."""

    kind: str
    """Its name in the progress of warm-up."""
    run: Callable[[], object]
    signatures: tuple[Hashable, ...] = ()
    """The step signatures that the run makes: the manifest is made of these. None for a change of state."""
    num_tokens: int = 0
    """Compared with the bound of warm-up."""
    is_common: bool = True
    """False for a branch other than greedy: it is run where warm-up has no bound."""


def report_signature(sizes: tuple[Hashable, ...], *, has_drafts: bool) -> Hashable:
    """`sizes`: rows, queries, and the branch of what travels besides tokens."""
    return ("report", *sizes, has_drafts)


class StepRecorder:
    def __init__(self) -> None:
        self.manifest: set[Hashable] = set()
        self.warmed: set[Hashable] = set()
        self.unexpected: list[Hashable] = []
        self._seen: set[Hashable] = set()
        self.num_steps = 0
        self._reads_before = 0
        self._compiled = 0
        self.coverage: Mapping[str, float] = {}
        """As `WorkerCounts` has it; set once, at load."""

    def expect(self, signatures: Iterable[Hashable]) -> None:
        """Signatures that the configuration can reach: warm-up runs some and lists the others."""
        self.manifest.update(signatures)

    def warm_up_done(self, num_host_syncs: int) -> None:
        """`num_host_syncs`: those so far, which no step will have made."""
        self.warmed, self._seen = self._seen, set()
        self._reads_before = num_host_syncs
        # Warm-up's own steps were told of programs that are none of theirs.
        self._compiled = 0

    def saw(self, signature: Hashable) -> None:
        self._seen.add(signature)
        if signature not in self.manifest:
            self.manifest.add(signature)
            self.unexpected.append(signature)
            logger.warning("Step signature %s was not part of the warm-up.", signature)

    def step_done(self) -> None:
        self.num_steps += 1

    def worked(self, backend: DeviceBackend, *, is_last: bool = False) -> WorkerCounts:
        """For the scheduler, with each step. `is_last`: for long, maybe."""
        if is_last or self.num_steps % _ASK_EVERY == 0:
            # A device that is set back, or does not answer, counts from 0: what it said before was so.
            self._compiled = max(self._compiled, backend.graphs.compiled_after_warmup())
        reads = backend.memory.num_host_syncs - self._reads_before
        return WorkerCounts(self.num_steps, reads, max(len(self.unexpected), self._compiled), self.coverage)

    def report(self, num_host_syncs: int) -> dict[str, object]:
        return {
            "graphs": {
                "warmup": len(self.warmed),
                "listed": len(self.manifest) - len(self.unexpected),
                "after_warmup": len(self.unexpected),
                "unexpected": [str(signature) for signature in self.unexpected],
            },
            "steps": self.num_steps,
            "host_syncs_per_step": (num_host_syncs - self._reads_before) / max(self.num_steps, 1),
        }
