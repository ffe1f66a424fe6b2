"""vLLM's Ray executor and its worker processes.

This module breaks if the executor chooses the devices of its workers differently.
"""

import ray
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_gaudi_spec.environment import set_host_address


def use_node_address() -> None:
    """Make this rank listen on the address that its node has in Ray, unless the user has set VLLM_HOST_IP on the node.

    Reason: vLLM's message queues between ranks listen on the address of the default route. If there is no default
    route, or if its network does not connect the nodes, ranks wait for each other forever at startup.
    Remove when: message queues between Ray workers use the node's address, like those between executor and workers.
    """
    set_host_address(ray.util.get_node_ip_address())
