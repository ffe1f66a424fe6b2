"""The vendor's fused operations that a device is expected to call, and those that it called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tests.conformance.paged import Kind
    from vllm_gaudi_spec.devices.base import DeviceBackend

# Where emulated cards keep the doubles of such operations.
_NAMESPACES = ("hpu", "npu")
_GAUDI, _ASCEND = "hpu-emulated", "ascend-emulated"
LAYERS: dict[str, dict[str, set[str]]] = {
    _GAUDI: {"norm": {"rms_norm"}, "added norm": {"rms_norm"}, "rotary": {"rotary_pos_embedding"}, "gate": set()},
    _ASCEND: {
        "norm": {"npu_rms_norm"},
        "added norm": {"npu_add_rms_norm"},
        "rotary": {"npu_rotary_mul"},
        "gate": {"npu_swiglu"},
    },
}


class Called(TorchDispatchMode):
    """Notes them while graphs are made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in _NAMESPACES and not name.startswith("_"):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def of_layer(backend: DeviceBackend, layer: str) -> set[str]:
    return LAYERS.get(backend.traits.name, {}).get(layer, set())


def of_attention(backend: DeviceBackend, kind: Kind, *, decode: bool) -> set[str]:
    plain = kind.value_size is None and not kind.soft_cap
    if backend.traits.name == _GAUDI:
        return {"sdpa_fwd"} if plain and not decode else set()
    if backend.traits.name == _ASCEND:
        writes = {"npu_scatter_pa_kv_cache"} if kind.value_size is None else set()
        attends = (
            {"npu_fused_infer_attention_score"} if plain and kind.dtype in backend.attention.fused_dtypes else set()
        )
        return writes | attends
    return set()
