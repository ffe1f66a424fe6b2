"""Patches for loading models, and for vLLM's calls of torch.accelerator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from vllm_gaudi_spec.config import UnsupportedConfigError, explain_pickled_weights
from vllm_gaudi_spec.upstream.patching import do_nothing, patches, replaced, wrap

# Maps functions of torch.accelerator to functions of the device's own module, such as torch.hpu. On any platform, vLLM
# calls these functions after loading, to measure memory, and at shutdown. None means a no-op.
_ACCELERATOR_CALLS = {
    "empty_cache": None,
    "empty_host_cache": None,
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "synchronize": "synchronize",
    "get_memory_info": "mem_get_info",
}


def answer_accelerator_calls(device_type: str) -> None:
    """Forward vLLM's calls of `torch.accelerator` to the device's own module, or ignore most of them on a CPU.

    Reason: torch's functions need an allocator that the Gaudi bridge and older torch_npu releases do not have
    ("Allocator for hpu is not a DeviceAllocator"), although torch treats the device as its accelerator. The functions
    also raise errors on a CPU, and vLLM does not always check `torch.accelerator.is_available()` first.
    Remove when: upstream always calls the platform instead of torch.accelerator.
    """
    import torch

    if device_type == "cuda" or (device_type == "cpu" and torch.accelerator.is_available()):  # torch supports these
        return
    for name, own_name in _ACCELERATOR_CALLS.items():
        if device_type == "cpu" and name == "get_memory_info":
            torch.accelerator.get_memory_info = _memory_of_host
        elif hasattr(torch.accelerator, name):
            nothing = device_type == "cpu" or own_name is None
            setattr(torch.accelerator, name, do_nothing if nothing else _asking(device_type, str(own_name)))


def _memory_of_host(*args: Any, **named: Any) -> tuple[int, int]:
    """Return the host's free and total memory in bytes. Gemma 4 uses it to decide how many images to encode at once."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    found = get_memory_node_info()
    return found.available_memory, found.total_memory


def _asking(device_type: str, own_name: str) -> Callable[..., Any]:
    def ask_the_device(*args: Any, **named: Any) -> Any:
        import torch

        # Look up the module in each call, because it is registered after this function is created.
        return getattr(torch.get_device_module(device_type), own_name)(*args, **named)

    return ask_the_device


def device_type_while_loading(device_type: str | None) -> AbstractContextManager[None]:
    """Return a context in which models see `device_type` as the platform's device type, or its own if it is None.

    Reason: the constructors of some models (DeepSeek, MiniCPM) create tensors on `current_platform.device_type`,
    regardless of the device on which the models are loaded. On a Gaudi, weights are loaded on the host, because on the
    device each copy to part of a model would run a small graph, and operators cannot mix devices (quirk S16).
    Remove when: no upstream model does this.
    """
    from vllm.platforms import current_platform

    return replaced(current_platform, "device_type", device_type or current_platform.device_type)


@patches("vllm.model_executor.model_loader.default_loader:DefaultModelLoader._prepare_weights")
def refuse_pickled_weights(
    original: Callable[..., Any], loader: Any, model_name_or_path: str, *more: Any, **named: Any
) -> Any:
    """Make vLLM's loader read only safetensors.

    Reason: if a folder has no safetensors files, the loader falls back to pickles (*.bin, *.pt), and reading a pickle
    runs code from the file. torch restricts what this code can do, but not running it is safer.
    Remove when: upstream rejects pickles or has an option to do so.
    """
    found = original(loader, model_name_or_path, *more, **named)
    _, files, are_safetensors, _ = found
    if not are_safetensors:
        raise UnsupportedConfigError(explain_pickled_weights(model_name_or_path, files[0]))
    return found


def list_unloaded_matrices(unloaded: list[tuple[str, Any]]) -> AbstractContextManager[None]:
    """Return a context in which the names and modules of matrices that a checkpoint does not fill are added to
    `unloaded`.

    Matrices of integers or FP8 values are not listed.
    Reason: upstream checks only classes whose `load_weights` returns the names of the loaded weights, and most heads
    return nothing. A head whose checkpoint uses different names would draft with uninitialized weights.
    Remove when: `load_weights` returns these names for all head classes.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.load_weights

    def list_marks(model: Any) -> Iterator[tuple[str, Any]]:
        for name, parameter in model.named_parameters():
            is_float = parameter.is_floating_point() and parameter.element_size() > 1  # FP8 has no test for NaN
            if parameter.dim() > 1 and is_float and not parameter.is_meta:
                # Check one value in each row, because vLLM merges several matrices into one.
                yield name, parameter.data[..., 0]

    def load_weights(loader: Any, model: Any, model_config: Any) -> None:
        for _, marks in list_marks(model):
            marks.fill_(math.nan)
        original(loader, model, model_config)
        for name, marks in list_marks(model):
            if marks.isnan().any():
                unloaded.append((name, model.get_submodule(name.rpartition(".")[0])))

    return replaced(DefaultModelLoader, "load_weights", load_weights)


def read_weights(read: Callable[..., Any]) -> None:
    """Make vLLM's loader pass the result of `read(tensors, model_config, model)` to a model instead of `tensors`, the
    tensors in its files.

    Reason: quantized checkpoints are dequantized while they are read. A custom loader would have to be selected with
    --load-format, which users may need for other purposes.
    Remove when: a vLLM quantization method can change a checkpoint's tensors.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def all_weights(original: Callable[..., Any], loader: Any, model_config: Any, model: Any) -> Any:
        return read(original(loader, model_config, model), model_config, model)

    wrap(DefaultModelLoader, "get_all_weights", all_weights)


def choose_cpu_linears(choose: Callable[..., None]) -> None:
    """Make `choose(original, layer, remove_weight)` select the kernel of each linear layer on a CPU.

    Reason: vLLM packs each weight for oneDNN at load time and drops the original, so that the weight cannot be
    converted later, and vLLM has no option for another kernel.
    Remove when: `dispatch_cpu_unquantized_gemm` has an option for the kernel.
    """
    from vllm.model_executor.layers import utils

    wrap(utils, "dispatch_cpu_unquantized_gemm", choose)


def take_kimi_linear_of_plain_layers() -> None:
    """Make vLLM use the Kimi Linear class that it has for ROCm.

    Reason: vLLM has two classes for this model. The default class uses CUDA streams and an attention layer based on
    CUDA kernels. The class for ROCm consists of layers that a platform can replace.
    Remove when: the class that upstream uses for out-of-tree platforms has `MLAAttention`.
    """
    from vllm.models import kimi_k3
    from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM

    kimi_k3.KimiLinearForCausalLM = KimiLinearForCausalLM


@patches("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn:set_triton_allocator")
def construct_olmo_hybrid_without_triton(original: Callable[..., None], *args: Any, **named: Any) -> None:
    """Allow OLMo Hybrid's recurrent layers to be constructed without Triton.

    Reason: their constructor sets Triton's allocator for kernels that are not used here and raises AttributeError.
    Remove when: upstream sets the allocator where it calls the kernels.
    """


@patches("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn:_make_fused_conv1d_weight_loader")
def load_convolutions_of_olmo_hybrid(original: Callable[..., Any], *sizes: Any, **named: Any) -> Callable[..., None]:
    """Tell OLMo Hybrid's weight loader to which of a layer's three convolutions a weight belongs.

    Reason: upstream stores this information as an attribute of the weight, as its linear layers expect. The loader of a
    convolution, however, expects it as an argument and raises TypeError.
    Remove when: `AutoWeightsLoader` passes the argument, or the loader of the parameter reads it from the tensor.
    """
    load = original(*sizes, **named)

    def weight_loader(parameter: Any, weight: Any, shard: int | None = None) -> None:
        load(parameter, weight, weight.shard_id if shard is None else shard)

    return weight_loader
