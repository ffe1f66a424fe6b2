"""vLLM's Ray executor and its worker processes.

This module breaks if the executor chooses the devices of its workers differently.
"""

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
