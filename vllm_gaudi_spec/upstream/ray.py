"""vLLM's executor on Ray, and its worker process.

Breaks when the executor chooses the devices of its workers in another way.
"""

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
