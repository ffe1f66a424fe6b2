"""The platform class through which vLLM sees an NVIDIA GPU when VGS_DEVICE=cuda asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_gaudi_spec.backends import load_backend
from vllm_gaudi_spec.config import UnsupportedConfigError, choose_start_method
from vllm_gaudi_spec.platform import SpecPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)


class CudaSpecPlatform(SpecPlatform):
    # To vLLM this is none of its own: it would look for its compiled operations.
    _enum = PlatformEnum.OOT
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "gloo"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    simple_compile_backend = "eager"

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
        if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
            logger.warning_once("--enforce-eager has no effect on VGS_DEVICE=cuda: steps are captured all the same.")
        # A process that was forked from one with an open card has none.
        choose_start_method(lambda: "spawn")

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's compiled operations are not used."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        super().import_ir_kernels()
        from vllm_gaudi_spec.backends import cuda_layers  # noqa: F401

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        from vllm.config.kernel import IrOpPriorityConfig

        from vllm_gaudi_spec.backends import cuda_layers

        norms = [cuda_layers.PROVIDER, "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=norms, fused_add_rms_norm=norms)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return load_backend().name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """vLLM's front end asks, to choose how much it schedules at once; it must not open the card."""
        return 0

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        Platform.update_block_size_for_backend.__func__(cls, vllm_config)
