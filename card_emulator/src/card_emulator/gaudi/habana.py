"""A replacement for the parts of the `habana_frameworks` package that vLLM workers call."""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.gaudi import recomputing
from card_emulator.names import GAUDI2

Stats = list[tuple[str, Any]]


class RotaryPosEmbeddingMode(enum.Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


class SynDeviceType(enum.Enum):
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def get_device_type() -> SynDeviceType:
    return SynDeviceType.synDeviceGaudi2 if DEVICE.generation == GAUDI2 else SynDeviceType.synDeviceGaudi3


def passes_sinks_on() -> bool:
    return DEVICE.bridge_flags.get("PT_HPU_ENABLE_FUSED_SDPA_SINK") is not False


class FusedSDPA:
    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if is_causal and attn_mask is not None:
            raise ValueError("FusedSDPA takes a mask or is_causal, not both")
        if valid_seq_len is not None and not is_causal:
            raise ValueError("FusedSDPA takes valid_seq_len with is_causal only")
        if dropout_p or return_attn_probs or return_dropout_mask:
            raise NotImplementedError("FusedSDPA: dropout and returned probabilities are not emulated")
        if DEVICE.hostile and not torch.is_inference_mode_enabled():
            # Outside inference mode, FusedSDPA takes its training path (vllm-gaudi#1104, vllm-fork#1691).
            raise DeviceRefusal("FusedSDPA outside of inference_mode: its training path recomputes only if causal")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        window = list(window_size)
        if not passes_sinks_on():
            sink = None  # like the bridge, without a warning (v1.24.0, sdpa_gen.cpp)
        return torch.ops.hpu.sdpa_fwd(
            q, k, v, attn_mask, 0.0, scale, is_causal, softmax_mode, valid_seq_len, seq_padding_type, window, sink
        )


def data_ptr(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


class FusedRMSNorm:
    @staticmethod
    def apply(
        data_in: torch.Tensor,
        gamma: torch.Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> torch.Tensor:
        return torch.ops.hpu.rms_norm(data_in, gamma, eps)[0]


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
    /,
) -> torch.Tensor:
    # The underlying operation takes sin before cos.
    return torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)


def mark_step(device_str: str = "", sync: bool = False) -> None:
    DEVICE.mark_step()
    if sync and DEVICE.lazy:
        torch.hpu.synchronize()  # type: ignore[attr-defined]


def is_lazy() -> bool:
    return DEVICE.lazy


def hpu_initialize(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    DEVICE.opened()
    return model


def hpu_set_env(model: Any = None, *args: Any, **kwargs: Any) -> None: ...


class Metric:
    """A metric of the bridge, counted since the process started or since this object was created."""

    def __init__(self, name: str, since_start: bool) -> None:
        if name not in ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache"):
            raise KeyError(f"no metric is called {name}")
        self.name = name
        self._base = 0 if since_start else self._now()

    def _now(self) -> int:
        total = DEVICE.counters.total
        return {"graph_compilation": total.compiles, "cpu_fallback": total.fallbacks}.get(self.name, 0)

    def stats(self) -> Stats:
        number = self._now() - self._base
        if self.name == "cpu_fallback":
            # Counts per operator, as in bridge 1.19, hpu/metrics/metrics.py.
            counted: Counter[str] = Counter()
            for event, count in DEVICE.counters.events.items():
                if event.kind == "CPU fallback":
                    counted[event.what] += count
            return [("TotalNumber", number), ("FallbackOps", dict(counted))]
        return [("TotalNumber", number), ("TotalTime", 0), ("AvgTime", 0)]


def metric_global(name: str) -> Metric:
    return Metric(name, since_start=True)


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    yield Metric(name, since_start=False)


@contextmanager
def env_setting(name: str, value: Any) -> Iterator[None]:
    """Set a flag of the bridge in a `with` block, and restore its previous value afterwards."""
    before = DEVICE.bridge_flags.get(name)
    _apply(name, value)
    try:
        yield
    finally:
        _apply(name, before)


def _apply(name: str, value: Any) -> None:
    DEVICE.bridge_flags[name] = value
    if name == "PT_COMPILE_ONLY_MODE":
        # Launch the pending operations in the mode in which they were issued.
        DEVICE.queue.flush(name)
        DEVICE.compile_only = bool(value)
    elif name == "PT_HPU_ENABLE_LAZY_COLLECTIVES":
        DEVICE.lazy_collectives = bool(value)
    elif name == "PT_HPU_PLACE_ON_CPU":
        DEVICE.allow_fallbacks = value != "none"


def make_modules(torch_hpu: ModuleType) -> dict[str, ModuleType]:
    """Return the package's modules by their full names. Each module is also an attribute of its parent."""
    grouping = {
        function.__name__: function
        for function in (recomputing.is_gqa, recomputing.gqa_input_reshape_fwd, recomputing.gqa_output_reshape)
    }
    contents: dict[str, dict[str, Any]] = {
        "": {},
        "torch": {"hpu": torch_hpu, "torch": torch},  # the real module also has torch as an attribute
        "torch.core": {
            "mark_step": mark_step,
            "hpu_initialize": hpu_initialize,
            "hpu_inference_initialize": hpu_initialize,
            "hpu_set_env": hpu_set_env,
            "hpu_inference_set_env": hpu_set_env,
        },
        "torch.utils": {},
        "torch.utils.internal": {"is_lazy": is_lazy},
        "torch.utils.experimental": {
            "_get_device_type": get_device_type,
            "synDeviceType": SynDeviceType,
            "_data_ptr": data_ptr,
        },
        "torch.internal": {},
        "torch.internal.bridge_config": {
            "env_setting": env_setting,
            "get_pt_hpu_enable_fused_sdpa_sink": passes_sinks_on,
        },
        "torch.hpu.metrics": {"metric_global": metric_global, "metric_localcontext": metric_localcontext},
        "torch.hpex": {},
        "torch.hpex.kernels": {
            "FusedSDPA": FusedSDPA,
            "RotaryPosEmbeddingMode": RotaryPosEmbeddingMode,
            "apply_rotary_pos_emb": apply_rotary_pos_emb,
            "fp8_fused_sdpa": recomputing.fp8_fused_sdpa,
        },
        # In the real package, an attribute and a submodule share each of these names. The attribute is a class.
        **{f"torch.hpex.kernels.{name}": grouping for name in ("FusedSDPA", "Fp8FusedSDPA")},
        "torch.hpex.normalization": {"FusedRMSNorm": FusedRMSNorm},
        "torch.distributed": {},
        "torch.distributed.hccl": {},
    }
    modules: dict[str, ModuleType] = {"habana_frameworks.torch.hpu": torch_hpu}
    for name, attributes in contents.items():
        full = ".".join(filter(None, ("habana_frameworks", name)))
        module = ModuleType(full)
        module.__path__ = []  # marks the module as a package, so that its submodules can be imported
        vars(module).update(attributes)
        modules[full] = module
    for full, module in modules.items():
        if module.__spec__ is None:  # importlib.util.find_spec reads this attribute to find the package
            module.__spec__ = ModuleSpec(full, None, is_package=True)
        parent, _, last = full.rpartition(".")
        if parent in modules and last not in vars(modules[parent]):
            setattr(modules[parent], last, module)
    return modules


def enter_modules(torch_hpu: ModuleType) -> None:
    sys.modules.update(make_modules(torch_hpu))
