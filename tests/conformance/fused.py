"""The vendor's fused operations that a device is expected to call, and those that it called."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.conformance.paged import Kind
from vllm_gaudi_spec.devices.base import DeviceBackend

# Where the vendors' software and its doubles keep such operations.
_NAMESPACES = ("hpu", "npu")
_GAUDI, _ASCEND = "hpu", "ascend"
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
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in _NAMESPACES and not name.startswith("_"):
            self.names.add(name)
            self.calls.append((name, args))
        return func(*args, **(kwargs or {}))


def _card(backend: DeviceBackend) -> str:
    return backend.traits.name.removesuffix("-emulated")


def of_layer(backend: DeviceBackend, layer: str) -> set[str]:
    return LAYERS.get(_card(backend), {}).get(layer, set())


def of_attention(backend: DeviceBackend, kind: Kind, *, decode: bool) -> set[str]:
    plain = kind.value_size is None and not (kind.soft_cap or kind.slopes)
    if _card(backend) == _GAUDI:
        return {"sdpa_fwd"} if plain and not decode else set()
    plain = plain and not kind.sinks
    if _card(backend) == _ASCEND:
        fused = kind.dtype in backend.attention.fused_dtypes
        writes = {"npu_scatter_pa_kv_cache"} if kind.value_size is None and fused else set()
        attends = {"npu_fused_infer_attention_score"} if plain and fused else set()
        return writes | attends
    return set()
