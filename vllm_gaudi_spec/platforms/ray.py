"""Ranks on CPUs, each an actor of Ray, on one machine or on several.

vLLM's executor counts cards. A rank on a CPU takes one of the CPUs that its Ray node offers, whatever the number of its
threads, and has no card to be told about.
"""

from __future__ import annotations

from typing import Any

import ray
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_gaudi_spec import compat


class CpuRayWorker(RayWorkerProc):
    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class CpuRayExecutor(RayExecutorV2):
    def _init_executor(self) -> None:
        with compat.ray_workers(CpuRayWorker):
            super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # The rank's CPU is reserved by its place in vLLM's placement group.
        return {"num_gpus": 0}
