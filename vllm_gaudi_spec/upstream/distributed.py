"""Groups of ranks, and the communicators of their devices.

Breaks when a group is initialized with other arguments, or asks its communicator for another collective.
"""

from typing import Any

import torch.distributed
from vllm.distributed import GroupCoordinator as GroupCoordinator
from vllm.distributed import destroy_distributed_environment as destroy_distributed_environment
from vllm.distributed import destroy_model_parallel as destroy_model_parallel
from vllm.distributed import ensure_model_parallel_initialized as ensure_model_parallel_initialized
from vllm.distributed import get_dp_group as get_dp_group
from vllm.distributed import get_pp_group as get_pp_group
from vllm.distributed import get_tensor_model_parallel_rank as get_tensor_model_parallel_rank
from vllm.distributed import get_tensor_model_parallel_world_size as get_tensor_model_parallel_world_size
from vllm.distributed import get_tp_group as get_tp_group
from vllm.distributed import init_distributed_environment as init_distributed_environment
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import (
    DeviceCommunicatorBase as DeviceCommunicatorBase,
)
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator as CpuCommunicator

groups = parallel_state._groups
"""Weak references to every group of the process, by name."""


def make_all_to_all(cpu_group: torch.distributed.ProcessGroup) -> Any:
    """Return the exchange of tokens between experts that is made of all-gather and reduce-scatter."""
    # Importing it looks for the libraries of every other exchange.
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

    return AgRsAll2AllManager(cpu_group)
