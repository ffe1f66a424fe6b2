"""Step signatures, the warm-up runs that create them, and the recorder that reports new signatures after warm-up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from vllm_gaudi_spec.records import WorkerCounts

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import SampleShape
    from vllm_gaudi_spec.sampling.branches import Branch

logger = init_logger(__name__)

_ASK_EVERY = 16
"""Number of steps between queries of the device's number of compiled graphs, because a query may be slow."""


DRAFTS, PROMPT_LOGPROBS = "rounds of drafts", "prompt logprobs"
PROMPT_CHUNKS, DRAFTERS_READS = "prompt chunks", "drafter's reads"
"""Kinds of warm-up runs whose size is limited by `--max-num-batched-tokens`."""
ENCODERS = "encoders"
"""Warm-up runs of image encoders, whose size is limited by the model's processor."""


class Job(NamedTuple):
    """A warm-up run on padding, which uses the same functions as serving."""

    kind: str
    """Name shown in the warm-up progress bar."""
    run: Callable[[], object]
    signatures: tuple[Hashable, ...] = ()
    """Signatures of the steps that the run creates, or empty if the run only changes state. The manifest contains the
    signatures of all runs."""
    num_tokens: int = 0
    """Number of tokens in the run, which is compared with the option `warmup_tokens`."""
    is_common: bool = True
    """False for runs of sampling branches other than the greedy one, which are skipped if warm-up has a limit."""


def report_sizes(shape: SampleShape, branch: Branch) -> tuple[Hashable, ...]:
    return shape.rows, shape.queries, branch.select_reports()


def report_signature(sizes: tuple[Hashable, ...], *, has_drafts: bool) -> Hashable:
    return ("report", *sizes, has_drafts)


def drafts_signature(num_rows: int) -> Hashable:
    return ("drafts", num_rows)


class StepRecorder:
    def __init__(self) -> None:
        self.manifest: set[Hashable] = set()
        self.warmed: set[Hashable] = set()
        self.unexpected: list[Hashable] = []
        self._num_unlisted = 0
        self._seen: set[Hashable] = set()
        self.num_steps = 0
        self._num_prefill_tokens = 0
        self._num_prefill_padding = 0
        self._syncs_before = 0
        self._compiled = 0
        self.coverage: Mapping[str, float] = {}
        """Fraction of the output that each vocabulary covers, which is set when the drafter is loaded."""
        self.step_times: Mapping[int, Sequence[float]] = {}
        """Seconds per decode step for adaptive verification (`WorkerCounts`), which are set at the end of warm-up."""

    def expect(self, signatures: Iterable[Hashable]) -> None:
        """Add the signatures that can occur with the configuration, including those that warm-up only lists."""
        self.manifest.update(signatures)

    def warm_up_done(self, num_host_syncs: int) -> None:
        """Start counting steps. Earlier device-to-host syncs, of which there were `num_host_syncs`, are not counted."""
        self.warmed, self._seen = self._seen, set()
        self._syncs_before = num_host_syncs
        # Reset the counter, because warm-up steps have counted the graphs compiled in warm-up.
        self._compiled = 0

    def saw(self, signature: Hashable) -> None:
        self._seen.add(signature)
        if signature not in self.manifest:
            self._num_unlisted += 1
            self.manifest.add(signature)
            self.unexpected.append(signature)
            logger.warning(
                "Step signature %s was not part of the warm-up, so its graph is compiled while requests wait.",
                signature,
            )

    def step_done(self) -> None:
        self.num_steps += 1

    def count_prefill(self, num_tokens: int, num_computed: int) -> None:
        """Count the real tokens in a batch of prompt chunks, and all tokens that the device computes for that batch."""
        self._num_prefill_tokens += num_tokens
        self._num_prefill_padding += num_computed - num_tokens

    def make_counts(self, backend: DeviceBackend, *, is_last: bool = False) -> WorkerCounts:
        """Return the counters that a step reports to the scheduler.

        If `is_last` is true, it may be a long time before the next step.
        """
        if is_last or self.num_steps % _ASK_EVERY == 0:
            # The device returns 0 for a counter that was reset or cannot be read, so keep the earlier count.
            self._compiled = max(self._compiled, backend.graphs.compiled_after_warmup())
        syncs = backend.memory.num_host_syncs - self._syncs_before
        compiled = max(len(self.unexpected), self._compiled)
        return WorkerCounts(
            self.num_steps,
            syncs,
            compiled,
            self.coverage,
            self._num_prefill_tokens,
            self._num_prefill_padding,
            self.step_times,
        )

    def report(self, num_host_syncs: int) -> dict[str, object]:
        return {
            "graphs": {
                "warmup": len(self.warmed),
                "listed": len(self.manifest) - self._num_unlisted,
                "after_warmup": len(self.unexpected),
                "unexpected": [str(signature) for signature in self.unexpected],
            },
            "steps": self.num_steps,
            "host_syncs_per_step": (num_host_syncs - self._syncs_before) / max(self.num_steps, 1),
        }
