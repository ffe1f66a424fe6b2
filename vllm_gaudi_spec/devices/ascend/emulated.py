"""The unchanged Ascend backend on an emulated NPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.devices.common.emulated import EmulatedGraphs, EmulatedMemory, EmulatedWeights, install_npu

# This call must precede the backend's import. If the platform was loaded first, it has already made the call.
install_npu()

from vllm_gaudi_spec.devices.ascend import backend as ascend  # noqa: E402
from vllm_gaudi_spec.devices.common.stream_device import StreamGraphs  # noqa: E402

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend

# The emulated fused attention also supports float32, so that results can be compared with those of other devices.
_FUSED_DTYPES = ascend.FUSED_DTYPES | {torch.float32}


def make_backend() -> DeviceBackend:
    return ascend.make_backend("ascend-emulated", _Graphs, _Memory, _Weights, _FUSED_DTYPES)


class _Graphs(EmulatedGraphs, StreamGraphs):
    pass


class _Memory(EmulatedMemory, ascend.AscendMemory):
    pass


class _Weights(EmulatedWeights, ascend.AscendWeights):
    pass
