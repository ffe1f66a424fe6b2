"""Warm-up jobs: the signatures that they list, and whether running them makes these."""

from collections.abc import Hashable, Iterable

from vllm_gaudi_spec.graphs import Job, StepRecorder


def listed(jobs: Iterable[Job]) -> list[Hashable]:
    return [signature for job in jobs for signature in job.signatures]


def run_jobs(jobs: Iterable[Job], recorder: StepRecorder) -> None:
    """Run each job. Fail if it makes other signatures than it lists."""
    for job in jobs:
        before, recorder._seen = recorder._seen, set()
        job.run()
        assert recorder._seen == set(job.signatures), job.kind
        recorder._seen |= before
    assert not recorder.unexpected
