"""Groups of ranks and their device communicators.

This module breaks if the arguments for initializing a group change, or if a group uses a different collective.
"""

from typing import Any

import torch.distributed
from vllm.distributed import (
    GroupCoordinator,
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_dp_group,
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    init_distributed_environment,
    parallel_state,
)
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.utils import get_distributed_timeout_or_none

groups = parallel_state._groups
"""Weak references to all groups in this process, by name."""


def make_all_to_all(cpu_group: torch.distributed.ProcessGroup) -> Any:
    """Return the communicator that exchanges tokens between experts by all-gather and reduce-scatter."""
    # Importing this class searches for the libraries of all other communicators.
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

    return AgRsAll2AllManager(cpu_group)
