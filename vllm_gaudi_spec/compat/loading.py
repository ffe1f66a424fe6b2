"""How models are loaded, and what of that needs an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.compat.patching import do_nothing, wrap
from vllm_gaudi_spec.config import UnsupportedConfigError, pickled_weights

# vLLM calls these after loading weights and while shutting down, whatever the platform.
_ACCELERATOR_CALLS = ("empty_cache", "empty_host_cache", "synchronize")


def quiet_missing_accelerator() -> None:
    """Without an accelerator, make the `torch.accelerator` calls that vLLM makes on its own do nothing.

    Reason: they raise where there is no accelerator, and vLLM guards only some of them for the CPU.
    Remove when: upstream asks `torch.accelerator.is_available()` first in its loader and its clean-up.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in _ACCELERATOR_CALLS:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, do_nothing)


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
