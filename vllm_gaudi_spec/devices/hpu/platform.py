"""Platform class for Gaudi cards, real or emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.environment import gaudi_chunks, gaudi_layers_of_a_recipe, gaudi_memory_reserve, set_gaudi_defaults
from vllm_gaudi_spec.platforms.base import CapturingPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HpuSpecPlatform(CapturingPlatform):
    device_name = "hpu"
    device_type = "hpu"
    dispatch_key = "HPU"
    ray_device_key = "HPU"
    dist_backend = "hccl"
    device_control_env_var = "HABANA_VISIBLE_MODULES"
    loads_on_host = True

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        set_gaudi_defaults()
        gaudi_memory_reserve()  # these three calls reject unknown values
        gaudi_layers_of_a_recipe()
        gaudi_chunks()
        _refuse_float16(vllm_config)
        super().check_and_update_config(vllm_config)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """No-op: environment variables select the card, and a process can use only one."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_gaudi_spec.devices.hpu.communicator.HpuCommunicator"


def _refuse_float16(vllm_config: VllmConfig) -> None:
    """Reject float16 if the user requested it. By default, vLLM chooses a supported dtype for a float16 checkpoint.

    Gaudi kernels do not support float16 (quirk S17). In addition, the self-test fails in float16, because adding the
    lowest float16 value to a score does not mask every key.
    """
    model = vllm_config.model_config
    if model is not None and model.dtype == torch.float16:
        raise UnsupportedConfigError(f"{model.model} is not served in float16 on a Gaudi; use --dtype bfloat16.")
