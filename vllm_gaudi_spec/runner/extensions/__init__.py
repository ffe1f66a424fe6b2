"""Extensions of the model runner for features that are needed only with some models or options.

The runner has a list of extensions and calls their hooks. `RunnerParts._make_extensions` selects the extensions.
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
    """Hooks in the order in which a step calls them. By default, each hook does nothing."""

    def apply(self, scheduled: SpecSchedulerOutput, requests: Requests) -> None:
        """Update this extension from the scheduler's output. `requests` already reflects that output."""

    def before_forwards(self, scheduled: SpecSchedulerOutput) -> None:
        """Prepare for a step's first forward pass. This hook is also called in steps without forward passes."""

    def fit(self, planned: list[Planned]) -> list[Planned]:
        """Return the batches that this rank runs."""
        return planned

    def add_to(self, batch: Batch) -> Batch:
        """Add the extension's inputs for the forward pass to the batch, and return the batch.

        On devices that capture steps, padding batches have no requests but get inputs of the same shapes and dtypes.
        """
        return batch

    def after_forward(self, batch: Batch) -> None:
        """Use the results of a batch's forward pass before the next forward pass overwrites them."""

    def after_forwards(self, scheduled: SpecSchedulerOutput) -> None:
        """Run once after the last forward pass of a step."""

    def add_to_result(self, step: StepResult) -> None:
        """Add results other than sampled tokens to a step's report. The tensors in `step` are still on the device."""

    def end_step(self, output: ModelRunnerOutput | Report) -> None:
        """Add information that the host has at the end of a step, before it reads the step's results."""

    def after_read(self, requests: list[Request], sampled: list[list[int]]) -> None:
        """Process the tokens of a step after the host has read them. This hook is not called with async scheduling."""

    def reset_encoder_cache(self) -> None:
        """Clear cached encoder outputs."""

    # --- warm-up ---

    def warm_up(self) -> None:
        """Run the operations that change the state of this extension during steps."""

    def jobs(self) -> Iterator[Job]:
        """Yield warm-up runs for graphs other than those of the forward and sampling passes."""
        yield from ()
