"""The platform class through which vLLM sees an Ascend NPU, real or emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.backends import ascend_device, load_backend  # noqa: F401  (the first gives torch the device)
from vllm_gaudi_spec.platform import CapturingPlatform

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


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
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        super().pre_register_and_update(parser)
        load_backend()  # where torch_npu is missing, the first to say so

    @classmethod
    def norm_provider(cls) -> str:
        from vllm_gaudi_spec.backends import ascend_layers

        return ascend_layers.PROVIDER

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.npu.set_device(device)
