"""Ray executor for CPU ranks on one or more machines.

vLLM's Ray executor reserves a GPU for each rank. This one reserves one CPU on the rank's Ray node instead, regardless
of how many threads the rank uses.
"""

from __future__ import annotations

from typing import Any

import ray

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.upstream.ray import RayExecutorV2, RayWorkerProc


class CpuRayWorker(RayWorkerProc):
    """The Ray actor of a CPU rank."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class CpuRayExecutor(RayExecutorV2):
    """vLLM's Ray executor, adapted to ranks without GPUs."""

    def _init_executor(self) -> None:
        with upstream.ray_workers(CpuRayWorker):
            super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # vLLM's placement group reserves one CPU for the rank.
        return {"num_gpus": 0}
