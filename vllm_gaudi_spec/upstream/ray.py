"""vLLM's Ray executor and its worker process.

Breaks if the executor chooses its workers' devices differently.
"""

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
