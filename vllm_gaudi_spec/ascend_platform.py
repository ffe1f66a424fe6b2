"""The platform class through which vLLM sees an Ascend NPU, real or emulated."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.backends import ascend_device  # noqa: F401  (gives torch the device)
from vllm_gaudi_spec.platform import CapturingPlatform


class AscendSpecPlatform(CapturingPlatform):
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    dist_backend = "hccl"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    loads_on_host = True

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def norm_provider(cls) -> str:
        from vllm_gaudi_spec.backends import ascend_layers

        return ascend_layers.PROVIDER

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.npu.set_device(device)
