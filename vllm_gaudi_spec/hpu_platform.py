"""The platform class through which vLLM sees a Gaudi, real or emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_gaudi_spec.backends import load_backend
from vllm_gaudi_spec.config import choose_start_method, set_gaudi_defaults
from vllm_gaudi_spec.platform import SpecPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig


logger = init_logger(__name__)


class HpuSpecPlatform(SpecPlatform):
    _enum = PlatformEnum.OOT
    device_name = "hpu"
    device_type = "hpu"
    dispatch_key = "HPU"
    ray_device_key = "HPU"
    dist_backend = "hccl"
    device_control_env_var = "HABANA_VISIBLE_MODULES"
    # For helpers of vLLM, some made while it is imported, when the bridge is not there yet.
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        set_gaudi_defaults()
        super().check_and_update_config(vllm_config)
        if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
            logger.warning_once("--enforce-eager has no effect on Gaudi: steps are captured all the same.")
        if vllm_config.load_config.device is None:
            # Weights are read and put together on the host, and copied once: thousands of small programs fewer.
            vllm_config.load_config.device = "cpu"
        # A process that was forked from one with an open card hangs when it ends.
        choose_start_method(lambda: "spawn")

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's compiled operations are for other devices."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        super().import_ir_kernels()
        load_backend()  # the bridge, or what stands in for it
        from vllm_gaudi_spec.backends import hpu_layers  # noqa: F401

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        from vllm.config.kernel import IrOpPriorityConfig

        from vllm_gaudi_spec.backends import hpu_layers

        norms = [hpu_layers.PROVIDER, "native"]
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
        """A process has one card, which the environment chose."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_gaudi_spec.backends.hpu_communicator.HpuCommunicator"

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        Platform.update_block_size_for_backend.__func__(cls, vllm_config)
