"""Quantized checkpoints that are dequantized while they are read, and which of them are.

Formats that can be read become the method `dequantized` (`method.py`) while vLLM makes the configuration; a model goes
back to vLLM's own method where the device has native kernels for its format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_gaudi_spec.config import NATIVE, REFERENCE, Options, UnsupportedConfigError, in_one_line
from vllm_gaudi_spec.quantization.checkpoint import Checkpoint, checked, dtype_name
from vllm_gaudi_spec.quantization.formats import (
    FP8,
    UINT4,
    CheckpointFormat,
    UnknownFormatError,
    method_of,
    read_format,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend, Weights

logger = init_logger(__name__)

DEQUANTIZED = "dequantized"
_HOW_THEY_STAY = {
    FP8: "FP8, and are multiplied by activations rounded to FP8",
    UINT4: "4-bit integers, and are converted whenever they are multiplied",
}

_load_backend: Callable[[], DeviceBackend] | None = None
_left_to_vllm: ContextVar[bool] = ContextVar("left_to_vllm", default=False)


def is_left_to_vllm() -> bool:
    """Whether the method that vLLM is looking for is to be its own."""
    return _left_to_vllm.get()


def use_device(load_backend: Callable[[], DeviceBackend]) -> None:
    """Name what loads the device, for layers and readers that vLLM makes by itself."""
    global _load_backend
    _load_backend = load_backend


def device() -> DeviceBackend:
    assert _load_backend is not None
    return _load_backend()


def native_inputs(format: CheckpointFormat, weights: Weights) -> tuple[str, ...]:
    """Dtypes of the inputs with which the device computes linear layers of the format as they are."""
    if format.native == FP8 and weights.multiplies_fp8:
        return ("bfloat16", "float32")  # the cast to FP8 has no form for float16 (lesson O30)
    if format.native == UINT4 and weights.converts_uint4:
        return ("bfloat16",)  # the one in which vllm-gaudi calls the operator (lesson Q09)
    return ()


def is_native(format: CheckpointFormat, dtype: torch.dtype, requested: str | None, weights: Weights) -> bool:
    """Whether linear layers of the format stay as they are. `requested`: the option `weight_kernels`. Converting 4-bit
    integers at each step saves memory alone, so that it is asked for."""
    takes_part = requested == NATIVE or (requested is None and format.native == FP8)
    return takes_part and dtype_name(dtype) in native_inputs(format, weights)


def choose_kernels(vllm_config: VllmConfig, model: ModelConfig, backend: DeviceBackend) -> None:
    """Of a model that would be dequantized: with reference kernels if the user asks for them, with native kernels of
    the device if it has some, else with vLLM's own if they run on it or the user asks for them."""
    requested = Options.from_vllm(vllm_config).weight_kernels
    if model.quantization != DEQUANTIZED:
        return
    if requested == REFERENCE:
        _report_dequantized(model, "as weight_kernels asks")
    elif not _stays_native(model, requested, backend.weights):
        _choose_vllms(vllm_config, model, requested, backend.weights)


def _stays_native(model: ModelConfig, requested: str | None, weights: Weights) -> bool:
    if (format := format_if_read(model)) is None:
        return False
    method, inputs = method_of(described(model)), native_inputs(format, weights)
    if is_native(format, model.dtype, requested, weights):
        logger.info_once(
            "%s: linear layers in %s stay %s; other quantized weights become %s while they are read.",
            *(model.model, method, _HOW_THEY_STAY[str(format.native)], dtype_name(model.dtype)),
        )
        return True
    if requested == NATIVE and inputs:
        raise UnsupportedConfigError(
            f"{model.model} has quantized weights ({method}), whose native kernels take inputs in "
            f"{' or '.join(inputs)}; use --dtype bfloat16, or leave weight_kernels out."
        )
    return False


def _choose_vllms(vllm_config: VllmConfig, model: ModelConfig, requested: str | None, weights: Weights) -> None:
    """Give the model back to vLLM's own method for its format, or report why it is dequantized."""
    method = method_of(described(model))
    is_target, quant_config = model is vllm_config.model_config, vllm_config.quant_config
    try:
        _leave_to_vllm(vllm_config, model)
        reason = None if requested == NATIVE else weights.missing_kernel(vllm_config, model)
    # vLLM's own refusal of a format, or of one in this dtype, and what else a malformed description comes to.
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = in_one_line(error)
        if requested == NATIVE:
            raise UnsupportedConfigError(
                f"{model.model} has quantized weights ({method}), which are not for vLLM's kernels ({reason}); leave "
                "weight_kernels out."
            ) from error
    if reason is None:
        logger.info_once("%s: weights in %s stay as they are, for vLLM's own kernels.", model.model, method)
        return
    _report_dequantized(model, f"vLLM's own kernels: {reason}")
    model.quantization = DEQUANTIZED
    if is_target:
        vllm_config.quant_config = quant_config


def _report_dequantized(model: ModelConfig, reason: str) -> None:
    logger.info_once(
        "%s: weights in %s become %s while they are read (%s).",
        *(model.model, method_of(described(model)), dtype_name(model.dtype), reason),
    )


def _leave_to_vllm(vllm_config: VllmConfig, model: ModelConfig) -> None:
    from vllm.config import VllmConfig as Config

    with _leaving_to_vllm():
        model.quantization = None
        model._verify_quantization()
        if model is vllm_config.model_config:
            vllm_config.quant_config = Config.get_quantization_config(model, vllm_config.load_config)


@contextmanager
def _leaving_to_vllm() -> Iterator[None]:
    token = _left_to_vllm.set(True)
    try:
        yield
    finally:
        _left_to_vllm.reset(token)


def format_of(model: ModelConfig) -> CheckpointFormat:
    """Of a model that is dequantized while it is read."""
    return read_format(described(model))


def format_if_read(model: ModelConfig) -> CheckpointFormat | None:
    """Of a quantized checkpoint, whatever kernels it has; None of others, and where the format is vLLM's to check."""
    try:
        return format_of(model) if described(model) else None
    except UnknownFormatError:
        logger.debug("The format of %s is vLLM's to check.", model.model, exc_info=True)
        return None


def described(model: ModelConfig) -> dict[str, Any]:
    """A checkpoint's `quantization_config`."""
    found: dict[str, Any] | None = model.model_arch_config.quantization_config
    return found or {}


def read_weights(
    tensors: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, loaded: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `loaded`, of what its files hold."""
    if model.quantization != DEQUANTIZED:
        format = format_if_read(model)
        return iter(tensors) if format is None else checked(model.model, format, tensors)
    from vllm.config import get_current_vllm_config

    format, requested = format_of(model), Options.from_vllm(get_current_vllm_config()).weight_kernels
    checkpoint = Checkpoint(model=model.model, format=format, dtype=model.dtype)
    if is_native(format, model.dtype, requested, device().weights):
        checkpoint.is_native = native_layers(loaded, format)
    if (is_unused := getattr(loaded, "is_unused_checkpoint_weight", None)) is not None:
        checkpoint.is_unused = is_unused
    _forget_format(loaded)
    return _read(checkpoint, tensors)


def _read(checkpoint: Checkpoint, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from checkpoint.weights(tensors)
    checkpoint.report()


def _forget_format(loaded: nn.Module) -> None:
    """vLLM's gpt-oss reads its files by what its configuration names, not by the method of its layers: it gets one of a
    model that is not quantized."""
    if type(loaded).__name__ != "GptOssForCausalLM":
        return
    for module in (loaded, loaded.model):
        config: Any = copy.copy(module.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        module.config = config


def native_layers(model: nn.Module, format: CheckpointFormat) -> Callable[[str], bool]:
    """Whether `model` keeps the layer of a name in the checkpoint as it is."""
    from vllm_gaudi_spec.quantization.fp8_linear import Fp8Linear
    from vllm_gaudi_spec.quantization.uint4_linear import Uint4Linear

    modules, mapper = dict(model.named_modules()), getattr(model, "hf_to_vllm_mapper", None)
    merged: dict[str, set[str]] = {}
    for module in modules.values():
        for whole, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
            for part in parts:
                merged.setdefault(part, set()).add(whole)

    def is_made_native(module: nn.Module) -> bool:
        return isinstance(getattr(module, "quant_method", None), Fp8Linear | Uint4Linear)

    def stays(layer: str) -> bool:
        tensor = f"{layer}.weight" if mapper is None else mapper.map_name(f"{layer}.weight")
        path, _, name = str(tensor).removesuffix(".weight").rpartition(".")
        names = [f"{path}.{name}".removeprefix(".") for name in (name, *merged.get(name, ()))]
        found = next((modules[name] for name in names if name in modules), None)
        if found is not None:
            return is_made_native(found)
        # Renamed by the model itself while it loads, as MTP heads are: as those whose names end alike.
        ends = tuple("." + ".".join(name.split(".")[-2:]) for name in names)
        alike = (module for other, module in modules.items() if other.endswith(ends))
        return format.may_be_native(layer) and all(map(is_made_native, alike))

    return stays
