"""Platform class for Ascend NPUs, real or emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.devices.ascend import device as ascend_device  # registers the device with torch
from vllm_gaudi_spec.environment import HCCL_EXPANSION, compresses_prompt_masks, hccl_expands_on_vector_cores
from vllm_gaudi_spec.platforms.base import CapturingPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.upstream.platforms import FlexibleArgumentParser


class AscendSpecPlatform(CapturingPlatform):
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    dist_backend = "hccl"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    takes_device_ids = True
    ray_noset_device_env_vars: ClassVar[list[str]] = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]
    loads_on_host = True

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        super().pre_register_and_update(parser)
        load_backend()  # fail here if torch_npu is missing

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.world_size_across_dp > 1 and hccl_expands_on_vector_cores():
            raise UnsupportedConfigError(
                f"{HCCL_EXPANSION.name}={HCCL_EXPANSION.value} is not supported with several ranks, because its "
                "collectives fail or hang in captured graphs whose tasks are updated (vllm-ascend#13688); unset it."
            )
        compresses_prompt_masks()  # rejects unknown values
        super().check_and_update_config(vllm_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_gaudi_spec.devices.common.even_exchange.EvenExchange"

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.npu.set_device(device)  # type: ignore[attr-defined]
        ascend_device.refuse_other_cards()
