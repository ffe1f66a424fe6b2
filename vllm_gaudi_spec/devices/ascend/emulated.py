"""The Ascend backend, unchanged, on an emulated card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.devices.common.emulated import EmulatedGraphs, EmulatedMemory, EmulatedWeights, install_npu

# Before importing the backend. The platform, if there is one, has done so already.
install_npu()

from vllm_gaudi_spec.devices.ascend import backend as ascend  # noqa: E402
from vllm_gaudi_spec.devices.common.stream_device import StreamGraphs  # noqa: E402

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend

# To compare the fused attention with that of other devices, number by number.
_FUSED_DTYPES = ascend.FUSED_DTYPES | {torch.float32}


def make_backend() -> DeviceBackend:
    return ascend.make_backend("ascend-emulated", _Graphs, _Memory, _Weights, _FUSED_DTYPES)


class _Graphs(EmulatedGraphs, StreamGraphs):
    pass


class _Memory(EmulatedMemory, ascend.AscendMemory):
    pass


class _Weights(EmulatedWeights, ascend.AscendWeights):
    pass
