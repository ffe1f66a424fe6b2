"""Platform class for NVIDIA GPUs, selected by VGS_DEVICE=cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.platforms.base import CapturingPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.upstream.platforms import FlexibleArgumentParser


class CudaSpecPlatform(CapturingPlatform):
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    takes_device_ids = True
    ray_noset_device_env_vars: ClassVar[list[str]] = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        super().pre_register_and_update(parser)
        load_backend()  # fail here if there is no GPU

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        num_ranks, found = parallel.local_world_size, torch.cuda.device_count()
        if num_ranks > found:
            raise UnsupportedConfigError(
                f"Only {found} of {num_ranks} requested GPUs were found; set --tensor-parallel-size to {found} or less."
            )
        if parallel.data_parallel_size > 1:
            raise UnsupportedConfigError(
                "Data parallelism is not supported on device cuda; leave out --data-parallel-size."
            )
        super().check_and_update_config(vllm_config)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return int(torch.cuda.get_device_properties(device_id).multi_processor_count)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)
