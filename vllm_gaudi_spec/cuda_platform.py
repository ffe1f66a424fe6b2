"""The platform class through which vLLM sees an NVIDIA GPU when VGS_DEVICE=cuda asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.backends import load_backend
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.platform import CapturingPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class CudaSpecPlatform(CapturingPlatform):
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "gloo"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        super().pre_register_and_update(parser)
        load_backend()  # where there is no GPU, the first to say so

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.world_size > 1:
            raise UnsupportedConfigError(
                "the CUDA reference runs on one GPU; leave out --tensor-parallel-size and --pipeline-parallel-size."
            )
        super().check_and_update_config(vllm_config)

    @classmethod
    def norm_provider(cls) -> str:
        from vllm_gaudi_spec.backends import cuda_layers

        return cuda_layers.PROVIDER

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)
