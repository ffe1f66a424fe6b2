"""vLLM's Ray executor and its worker processes.

This module breaks if the executor chooses the devices of its workers differently.
"""

import ray
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_gaudi_spec.environment import set_host_address


def use_node_address() -> None:
    """Make this rank listen at its node's address in Ray, unless the user set VLLM_HOST_IP on the node.

    Reason: vLLM's message queues between ranks listen at the address of the default route. Without a default route, or
    if that network does not connect the nodes, ranks wait for each other forever while they start.
    Remove when: queues between Ray workers get the node's address, as those between executor and workers do.
    """
    set_host_address(ray.util.get_node_ip_address())
