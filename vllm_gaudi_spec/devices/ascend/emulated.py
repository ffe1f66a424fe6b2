"""The Ascend backend, unchanged, on the emulated card."""

from __future__ import annotations

import torch

from vllm_gaudi_spec import emulator

# Before the import: the emulator puts a `torch_npu` in place. The platform has done so where there is one.
emulator.install_npu()

from vllm_gaudi_spec.devices.ascend import backend as ascend  # noqa: E402
from vllm_gaudi_spec.devices.common.emulated import OnEmulatedCard  # noqa: E402


class Backend(OnEmulatedCard, ascend.Backend):
    name = "ascend-emulated"
    # So that answers of the fused attention can be held against those of other devices, number by number.
    fused_dtypes = ascend.Backend.fused_dtypes | {torch.float32}
