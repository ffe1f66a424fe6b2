"""Extensions of the model runner: features that only some models or options need.

The runner holds a list of them and calls their hooks. `RunnerParts._make_extensions` chooses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_gaudi_spec.graphs import Job
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.records import Batch, Planned, Request, StepResult
    from vllm_gaudi_spec.runner.report import Report
    from vllm_gaudi_spec.runner.requests import Requests


class Extension:
    """The hooks in the order in which a step calls them. The defaults do nothing."""

    def apply(self, scheduled: SpecSchedulerOutput, requests: Requests) -> None:
        """Follow the scheduler's output, which `requests` has already followed."""

    def before_forwards(self, scheduled: SpecSchedulerOutput) -> None:
        """Act before the first forward of a step, or in a step without any."""

    def fit(self, planned: list[Planned]) -> list[Planned]:
        """Return the batches that this rank runs."""
        return planned

    def add_to(self, batch: Batch) -> Batch:
        """Return the batch with what its forward reads besides tokens.

        Where steps are captured, padding, which has no requests, has to get the same form.
        """
        return batch

    def after_forward(self, batch: Batch) -> None:
        """Use what a batch's forward left before the next one overwrites it."""

    def after_forwards(self, scheduled: SpecSchedulerOutput) -> None:
        """Act after the last forward of a step."""

    def add_to_result(self, step: StepResult) -> None:
        """Add what a step reports besides sampled tokens. `step` is still on the device."""

    def end_step(self, output: ModelRunnerOutput | Report) -> None:
        """Add what the host knows at the end of a step, before its results are read."""

    def after_read(self, requests: list[Request], sampled: list[list[int]]) -> None:
        """Follow the tokens of a step that the host has read. Not called with async scheduling."""

    def reset_encoder_cache(self) -> None:
        """Forget the outputs of encoders."""

    # --- warm-up ---

    def warm_up(self) -> None:
        """Run the changes of state that steps run."""

    def jobs(self) -> Iterator[Job]:
        """Yield the warm-up jobs of graphs other than forwards and sampling."""
        yield from ()
