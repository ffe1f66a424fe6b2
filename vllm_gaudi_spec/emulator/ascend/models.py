"""The NPU that is emulated: an Ascend 910B of 64 GB."""

from __future__ import annotations

from vllm_gaudi_spec.emulator.ascend.streams import NpuQueue
from vllm_gaudi_spec.emulator.card import GIB, Model


def _lacks(packet: str, name: str) -> bool:
    return False


ASCEND_910B = Model(
    name="Ascend910B3",
    device_type="npu",
    dispatch_key="PrivateUse1",
    guard_slot=20,
    # As messages about memory that ran out print it for a card of 64 GB.
    memory=int(60.97 * GIB),
    e4m3_max=448.0,
    float64_on_host=True,
    lacks=_lacks,
    negative_index="none is known to count from the end here",
    pins_memory=True,
    queue=NpuQueue,
)
