"""The backend for Intel Gaudi. In lazy mode, steps run as HPU graphs. In compiled mode, `hpu_backend` compiles them.

This backend has not yet run on a real Gaudi. It runs unchanged on the emulated card (`card_emulator/`) in both modes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_gaudi_spec.attention import flat, padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.config import GAUDI2, GAUDI3
from vllm_gaudi_spec.devices.base import DeviceBackend, DeviceTraits, Graphs, Memory, Weights
from vllm_gaudi_spec.devices.common.arguments import flatten, make_key
from vllm_gaudi_spec.devices.common.kv_pair import KVPair, PairAttention
from vllm_gaudi_spec.devices.common.stream_device import StreamMemory
from vllm_gaudi_spec.devices.hpu import compared
from vllm_gaudi_spec.devices.hpu import fp8 as hpu_fp8
from vllm_gaudi_spec.devices.hpu.bridge import Bridge, open_bridge
from vllm_gaudi_spec.devices.hpu.captured import CapturedFunction
from vllm_gaudi_spec.devices.hpu.communicator import split_long_prompts
from vllm_gaudi_spec.environment import gaudi_is_lazy, gaudi_layers_of_a_recipe, gaudi_memory_reserve
from vllm_gaudi_spec.upstream.kv_cache import AttentionLayerBase

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import Function
    from vllm_gaudi_spec.quantization.config import LoadContext, Measuring, QuantConfig
    from vllm_gaudi_spec.quantization.encodings import Words
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheLayout

logger = init_logger(__name__)


# These traits describe lazy mode; `assemble` adapts them to compiled mode.
TRAITS = DeviceTraits(
    name="hpu",
    mode="lazy",
    torch_device=torch.device("hpu"),
    captures=True,
    updates_views=False,
    compiles=True,
    flat_decode=True,
    causal_first_chunks=True,
    prefill_step=256,
    prefill_parts=2,
    runs_stages=True,
    selects_keys=True,
    media_models=compared.MEDIA["lazy"],
    recurrent_models=compared.RECURRENT["lazy"],
    takes_quant_config=True,
    updates_weights=True,
)


# The bridge raises a RuntimeError with this message if it cannot allocate a tensor or the memory for a recipe
# (vllm-fork#257, #484, and vllm-gaudi's calibration guide).
_ALLOCATION_FAILED = re.compile(r"Allocation (?:of|failed for) size ?::(\d+)")


def make_backend() -> DeviceBackend:
    bridge = open_bridge()
    graphs = HpuGraphs(bridge)
    return assemble(bridge, TRAITS, graphs, HpuMemory(bridge, graphs), HpuWeights(bridge))


def assemble(bridge: Bridge, traits: DeviceTraits, graphs: Graphs, memory: Memory, weights: Weights) -> DeviceBackend:
    if not gaudi_is_lazy():
        traits = replace(
            traits,
            mode="compiled",
            updates_views=True,
            runs_stages=False,
            sleeps=True,
            media_models=compared.MEDIA["compiled"],
            recurrent_models=compared.RECURRENT["compiled"],
        )
    return DeviceBackend(traits=traits, graphs=graphs, memory=memory, attention=HpuAttention(bridge), weights=weights)


class HpuGraphs(Graphs):
    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._compiled_in_warmup = 0
        self._compiling_only = False

    def graph(self, function: Function) -> Function:
        if (regions := self._bridge.regions) is not None:
            return regions.compiled(function)
        graphs: dict[Hashable, Any] = {}

        def run(*args: Any) -> Any:
            tensors, rest = flatten(args)
            key = make_key(tensors, rest)
            # Launch previously issued work so that it does not become part of this graph.
            self._bridge.mark_step()
            if graph := graphs.get(key):
                return graph.unpack_result(tensors, graph(tensors))
            made = CapturedFunction(function, rest)
            graph = self._bridge.habana.hpu.wrap_in_hpu_graph(made, disable_tensor_cache=True)
            result = graph.unpack_result(tensors, graph(tensors))
            graphs[key] = graph
            if self._compiling_only:
                graph(tensors)  # the second call may cause more compilations
            return result

        return cast("Function", run)

    @contextmanager
    def compiling_only(self) -> Iterator[None]:
        bridge = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
        self._compiling_only = True
        try:
            with bridge.env_setting("PT_COMPILE_ONLY_MODE", True):
                yield
        finally:
            self._compiling_only = False

    def num_recipes(self) -> int:
        return self._num_compiled()

    def warmed_up(self) -> None:
        self._compiled_in_warmup = self._num_compiled()

    def step_done(self) -> None:
        self._bridge.mark_step()

    def compiled_after_warmup(self) -> int:
        return self._num_compiled() - self._compiled_in_warmup

    def counts(self) -> dict[str, Any]:
        regions = self._bridge.regions
        return {
            **({} if regions is None else {"captured": dict(regions.functions), "regions": regions.num_compiled}),
            "compiled_in_warmup": self._compiled_in_warmup,
            "compiled_after_warmup": self.compiled_after_warmup(),
            "graph_compilation": _read_metric("graph_compilation"),
            "cpu_fallback": _read_metric("cpu_fallback"),
        }

    def _num_compiled(self) -> int:
        return int(_read_metric("graph_compilation").get("TotalNumber", 0))


class HpuMemory(StreamMemory):
    def __init__(self, bridge: Bridge, graphs: Graphs) -> None:
        super().__init__(_hpu(), TRAITS.torch_device, graphs)
        self._bridge = bridge
        self._pinned: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        """Unused pinned host memory, which is kept for later copies because each allocation calls the driver."""

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, KVPair]:
        by_layer = super().allocate_kv(kv_cache_config, layout)
        self._bridge.mark_step()
        return by_layer

    def release(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> Callable[[], None]:
        found = [(tensor, tensor.shape, tensor.cpu() if keep else None) for tensor in tensors]
        for tensor, *_ in found:
            tensor.data = tensor.new_empty(0)

        def bring_back() -> None:
            for tensor, shape, host in found:
                tensor.data = tensor.new_zeros(shape) if host is None else host.to(tensor.device)

        return bring_back

    measures_peak = True

    def measure_peak(self, run: Callable[[], object]) -> int:
        # A recipe's memory may come from the bridge's pool or from the driver, so return the larger of two
        # measurements.
        self._runtime.synchronize()
        allocated, free = self._runtime.memory_allocated(), self.free_bytes()
        self._runtime.reset_peak_memory_stats()
        run()
        self._bridge.mark_step()
        self._runtime.synchronize()
        return max(int(self._runtime.max_memory_allocated()) - int(allocated), free - self.free_bytes(), 0)

    def bytes_asked(self, error: RuntimeError) -> int | None:
        found = _ALLOCATION_FAILED.search(str(error))
        return int(found[1]) if found else None

    def get_graph_reserve(self) -> float:
        return gaudi_memory_reserve()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.torch_device, non_blocking=True)

    @cached_property
    def _downloads(self) -> Any:
        """The stream that copies results to the host."""
        return self._runtime.Stream()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_host_syncs += 1
        return tensor.cpu()

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.num_host_syncs += 1
        host = self._take_pinned(tensor)
        if host is None:
            # Copy synchronously. An asynchronous copy to unpinned memory ends in a callback that events do not wait
            # for.
            arrived = tensor.cpu()
            return lambda: arrived
        # The next replay may overwrite the results before they are copied, so copy a clone. A separate stream is used,
        # as in vllm-gaudi.
        copy = tensor.clone()
        issued = self._runtime.current_stream()
        with self._runtime.stream(self._downloads):
            self._downloads.wait_stream(issued)
            host.copy_(copy, non_blocking=True)
            done = self._runtime.Event()
            done.record()
        return partial(self._finish_download, done, host, copy)

    def _finish_download(self, done: Any, host: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Wait for a copy to the host. `source` keeps the copied tensor alive until then."""
        done.synchronize()
        arrived = host.clone()
        self._pinned.setdefault((host.shape, host.dtype), []).append(host)
        return arrived

    def _take_pinned(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return pinned memory for a copy of `like`, or None if torch cannot allocate it."""
        if free := self._pinned.get((like.shape, like.dtype)):
            return free.pop()
        try:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        else:
            if buffer.is_pinned():
                return buffer
            reason = "torch's is not pinned"
        logger.warning_once("Torch cannot pin host memory (%s), so each step waits for its results.", reason)
        return None


def _hpu() -> Any:
    """Return torch.hpu, which exists once the bridge is loaded."""
    return importlib.import_module("habana_frameworks.torch.hpu")


# The size in bytes of a row's mask at which the fused kernel starts to fail (vllm-gaudi#1749).
LARGEST_MASK = 2**31

# Models that need a more precise softmax: vllm-gaudi, extension/features.py (fp32_softmax), vllm-gaudi#831.
_SOFTMAX_MODES = dict.fromkeys(("qwen2", "qwen2_5_vl", "qwen2_5_vl_text"), "fp32")


class HpuAttention(PairAttention):
    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        kernels = importlib.import_module("habana_frameworks.torch.hpex.kernels")
        self._fused_sdpa: Any = getattr(kernels, "FusedSDPA", None)
        self._fuses_sinks = _has_argument(self._fused_sdpa, "sink") and _passes_sinks_on()

    def attend(
        self, query_THD: torch.Tensor, kv_cache: KVPair, call: AttentionCall, spec: AttentionLayerSpec
    ) -> torch.Tensor:
        keys, values = kv_cache.blocks()
        if call.flat is not None:
            return flat.attend(query_THD, keys, values, call, spec)
        if values is None or not self._can_fuse(spec):
            # The fused kernel's documentation does not say whether it supports the size of latent keys.
            return padded.attend(query_THD, keys, values, call, spec)
        return self._attend_fused(query_THD, keys, values, call, spec)

    def _can_fuse(self, spec: AttentionLayerSpec) -> bool:
        """Whether the fused kernel supports a layer.

        ALiBi slopes would require a bias as large as all of the layer's attention scores (quirk A23).
        """
        if self._fused_sdpa is None or spec.layer_operations or spec.logits_soft_cap or spec.slopes_H is not None:
            return False
        return spec.sinks_H is None or self._fuses_sinks

    def _attend_fused(
        self,
        query_THD: torch.Tensor,
        keys_NSKD: torch.Tensor,
        values_NSKD: torch.Tensor,
        call: AttentionCall,
        spec: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Compute attention for prompt chunks with the fused kernel, over all keys of their requests."""
        query_BHQD = _split_rows(query_THD, call)
        if call.fresh_kv and _sees_all_before(call, spec):
            keys_BKSD, values_BKSD = (_split_rows(part_TKD, call) for part_TKD in call.fresh_kv)
            mask, size = None, call.num_queries
        else:
            keys_BKSD = padded.gather_rows(keys_NSKD, call.block_table_BW, spec.operations.k_cache)
            values_BKSD = padded.gather_rows(values_NSKD, call.block_table_BW, spec.operations.v_cache)
            mask = call.plan(("mask", spec.mask_key, spec.dtype), lambda: _build_mask(call, spec))
            size = _choose_split(mask)
        softmax_mode = "None" if spec.dtype != torch.bfloat16 else _SOFTMAX_MODES.get(spec.model_type, "fast")
        # Only positional arguments are documented. The three before the sinks disable features that are not used.
        sinks = () if spec.sinks_H is None else (False, False, (-1, -1), spec.sinks_H)
        rest = (0.0, mask is None, spec.scale, softmax_mode, True, None, "right", *sinks)
        if mask is None or size == call.num_queries:
            attended_BHQD = self._fused_sdpa.apply(query_BHQD, keys_BKSD, values_BKSD, mask, *rest)
        else:
            parts = zip(query_BHQD.split(size, dim=2), mask.split(size, dim=2), strict=True)
            attended_BHQD = torch.cat(
                [self._fused_sdpa.apply(query, keys_BKSD, values_BKSD, part, *rest) for query, part in parts], dim=2
            )
        if sinks and self._bridge.regions is None:
            self._bridge.mark_step()  # vllm-gaudi does this too, without stating a reason (quirk A13)
        return attended_BHQD.transpose(1, 2).flatten(0, 1)


class HpuWeights(Weights):
    device_name = "hpu"
    fp8_arithmetic = fp8_logits = hpu_fp8.GaudiArithmetic
    multiplies_fp8 = True
    converts_uint4 = True

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @property
    def fp8_range(self) -> str | None:
        # Querying the device's name instead may print lines from the runtime's log.
        experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
        kind = experimental._get_device_type()
        return {
            experimental.synDeviceType.synDeviceGaudi2: GAUDI2,
            experimental.synDeviceType.synDeviceGaudi3: GAUDI3,
        }.get(kind, GAUDI2)  # for an unknown card, use the narrower range

    def loading(self, quant_config: QuantConfig) -> AbstractContextManager[None]:
        hpu_fp8.prepare_loading()
        return nullcontext()

    def quantize(self, model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Measuring | None:
        return hpu_fp8.apply(model, quant_config, load_context)

    def from_uint4(self, words: Words, dtype: torch.dtype) -> torch.Tensor:
        weight_KN: torch.Tensor = torch.ops.hpu.convert_from_uint4(
            words.weight_KW, words.scales_GN, words.zeros_GW, dtype
        )
        return weight_KN

    def prepare_model(self, model: nn.Module) -> None:
        with torch.inference_mode():
            model.to(TRAITS.torch_device)
            _move_plain_tensors(model, TRAITS.torch_device)
        mark_layers(model, self._bridge.mark_step, gaudi_layers_of_a_recipe())
        split_long_prompts(model)
        # Wait for the copies.
        self._bridge.mark_step()
        _hpu().synchronize()


def mark_layers(model: nn.Module, mark_step: Callable[[], None], every: int) -> None:
    """Insert a marker after every `every`-th layer with attention, or none if `every` is 0.

    Layers between markers then share a recipe, which is compiled only once. A single recipe for the whole model would
    take a long time to compile and might be too large to run (optimum-habana#1722).
    """
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            for layer in module:
                if any(isinstance(part, AttentionLayerBase) for part in layer.modules()):
                    layers.append(layer)
                    inside.update(layer.modules())
    for number, layer in enumerate(layers, start=1):
        if every and number % every == 0:
            layer.register_forward_hook(lambda *_: mark_step())


def _move_plain_tensors(model: nn.Module, device: torch.device) -> None:
    """Move tensors that are neither parameters nor buffers, because `Module.to` leaves them on the host.

    Modules that share a tensor still share it afterwards. INC's scales stay on the host, where INC needs them (quirk
    Q15). Zero-dimensional tensors also stay on the host, because graphs store their values as constants.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        scales = getattr(module, "scale_members", ())
        for name, tensor in list(vars(module).items()):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.dim() and name not in scales:
                # Keep the original alive, so that its `id` is not reused during the loop.
                setattr(module, name, moved.setdefault(id(tensor), (tensor, tensor.to(device)))[1])


def _has_argument(fused: Any, name: str) -> bool:
    """Whether the `forward` or `apply` function of a bridge operator has an argument with this name."""
    functions = (getattr(fused, kind, None) for kind in ("forward", "apply"))
    return any(name in inspect.signature(function).parameters for function in functions if function is not None)


def _passes_sinks_on() -> bool:
    """Whether the bridge passes attention sinks to the kernel.

    If PT_HPU_ENABLE_FUSED_SDPA_SINK is off, the bridge silently drops sinks (quirk A32).
    """
    bridge = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
    flag = getattr(bridge, "get_pt_hpu_enable_fused_sdpa_sink", None)
    return flag is not None and bool(flag())


def _split_rows(tensor_THD: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return a view [B, H, Q, D]."""
    return tensor_THD.unflatten(0, (call.num_rows, call.num_queries)).transpose(1, 2)


def _sees_all_before(call: AttentionCall, spec: AttentionLayerSpec) -> bool:
    """Whether the kernel's causal mode computes the right mask for a prompt's first chunk, without windows or spans.

    It is not used with sinks, because no known source combines the two.
    """
    reach = min(spec.sliding_window or call.num_queries, spec.attention_chunk or call.num_queries)
    return spec.is_causal and reach >= call.num_queries and call.spans is None and spec.sinks_H is None


def _build_mask(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """Return the mask [B, 1, Q, keys] that is added to the scores."""
    # Use tensors, because with Python numbers, `where` would return a float32 mask, which would have to be converted.
    seen, hidden = (
        torch.full((), value, dtype=spec.dtype, device=call.starts_B.device)
        for value in (0.0, torch.finfo(spec.dtype).min)
    )
    return torch.where(padded.find_visible(call, spec)[:, None], seen, hidden)


def _choose_split(mask: torch.Tensor) -> int:
    """Return the number of queries per kernel call with a mask [B, 1, Q, keys].

    The result is the smallest one with the minimum number of calls. One call would not suffice for all masks, because
    the kernel uses 32-bit mask offsets and returns NaN for a row whose mask takes 2 GiB (quirk A30).
    """
    num_queries, num_keys = mask.shape[-2:]
    at_once = max((LARGEST_MASK - 1) // (num_keys * mask.element_size()), 1)
    return -(-num_queries // -(-num_queries // at_once))


def _read_metric(name: str) -> dict[str, Any]:
    """Return the bridge's counters since the process started, or an empty dict if this build has none."""
    metric = importlib.import_module("habana_frameworks.torch.hpu.metrics").metric_global(name)
    return {} if metric is None else dict(entry for entry in metric.stats() if len(entry) == 2)
