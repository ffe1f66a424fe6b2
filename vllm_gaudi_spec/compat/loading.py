"""How models are loaded, and what of that needs an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.compat.patching import do_nothing, wrap
from vllm_gaudi_spec.config import UnsupportedConfigError, pickled_weights

# What vLLM calls after it loaded weights, when it measures memory and while it shuts down, whatever the platform; and
# the function of the device's own module, such as torch.hpu, that does it. None: there is nothing to do.
_ACCELERATOR_CALLS = {
    "empty_cache": None,
    "empty_host_cache": None,
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "synchronize": "synchronize",
    "get_memory_info": "mem_get_info",
}


def answer_accelerator_calls(device_type: str) -> None:
    """Let the `torch.accelerator` calls that vLLM makes on its own ask the device's own module, or do nothing on a CPU.

    Reason: torch's functions need an allocator that Gaudi's bridge and older releases of torch_npu do not have
    ("Allocator for hpu is not a DeviceAllocator"), although torch sees the card as its accelerator. On a CPU they raise
    too, and vLLM guards only some of them. So the platform decides, and not `torch.accelerator.is_available()`.
    Remove when: upstream calls the platform instead, and never torch.accelerator.
    """
    import torch

    if device_type == "cuda":  # torch's own
        return
    for name, own_name in _ACCELERATOR_CALLS.items():
        if device_type == "cpu" and name == "get_memory_info":
            continue  # there is no number that would be right
        if hasattr(torch.accelerator, name):
            nothing = device_type == "cpu" or own_name is None
            setattr(torch.accelerator, name, do_nothing if nothing else _asking(device_type, str(own_name)))


def _asking(device_type: str, own_name: str) -> Callable[..., Any]:
    def ask_the_device(*args: Any, **named: Any) -> Any:
        import torch

        # Found when it is called: the device's module is registered after this.
        return getattr(torch.get_device_module(device_type), own_name)(*args, **named)

    return ask_the_device


def refuse_pickled_weights() -> None:
    """Let vLLM's loader take safetensors only.

    Reason: where a folder has none, it falls back to pickles (*.bin, *.pt), whose reading is a program that the file
    brings. torch limits what such a program can do; nothing is as safe as not to run it.
    Remove when: upstream refuses pickles, or can be told to.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    wrap(DefaultModelLoader, "_prepare_weights", _take_safetensors)


def _take_safetensors(
    original: Callable[..., Any], loader: Any, model_name_or_path: str, *more: Any, **named: Any
) -> Any:
    found = original(loader, model_name_or_path, *more, **named)
    _, files, are_safetensors, _ = found
    if not are_safetensors:
        raise UnsupportedConfigError(pickled_weights(model_name_or_path, files[0]))
    return found


def make_mla_layers(layer_class: type) -> None:
    """Let MLA layers be of `layer_class`, a class derived from vLLM's, whoever makes them.

    Reason: vLLM's models and its transformers backend each name the class of the layer, whose forward wants the
    metadata of upstream's own backends. It cannot be registered out of tree, as the wrapper around it can.
    Remove when: `MLAAttention` is a layer for which a platform may register its own.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def make(original: Callable[..., None], layer: Any, *args: Any, **named: Any) -> None:
        original(layer, *args, **named)
        if type(layer) is MLAAttention:
            layer.__class__ = layer_class

    wrap(MLAAttention, "__init__", make)


def choose_cpu_linears(choose: Callable[..., None]) -> None:
    """Let `choose(original, layer, remove_weight)` find the kernel of each linear layer on a CPU.

    Reason: vLLM packs each weight for oneDNN while it loads it and drops it, so that no other format can be made of it
    later, and has no way to name another kernel.
    Remove when: `dispatch_cpu_unquantized_gemm` can be told which kernel to take.
    """
    from vllm.model_executor.layers import utils

    wrap(utils, "dispatch_cpu_unquantized_gemm", choose)
