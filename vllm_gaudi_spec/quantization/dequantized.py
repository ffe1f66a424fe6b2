"""Decides whether a quantized checkpoint is dequantized while it is loaded, and reads its weights.

While vLLM creates the configuration, every checkpoint whose format we can read gets the `dequantized` method
(`method.py`). Later, a model is returned to vLLM's own method if vLLM's kernels for its format run on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_gaudi_spec.config import NATIVE, REFERENCE, Options, UnsupportedConfigError, in_one_line
from vllm_gaudi_spec.quantization.checkpoint import Checkpoint, check_tensors, dtype_name
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
    """Whether to leave the choice of the quantization method to vLLM."""
    return _left_to_vllm.get()


def use_device(load_backend: Callable[[], DeviceBackend]) -> None:
    """Set the function that loads the device. vLLM creates layers and readers, so they cannot get it as an argument."""
    global _load_backend
    _load_backend = load_backend


def device() -> DeviceBackend:
    assert _load_backend is not None
    return _load_backend()


def native_inputs(format: CheckpointFormat, weights: Weights) -> tuple[str, ...]:
    """Return the input dtypes of the device's native kernels for linear layers in a format. The result may be empty."""
    if format.native == FP8 and weights.multiplies_fp8:
        return ("bfloat16", "float32")  # the cast to FP8 does not support float16 (quirk O30)
    if format.native == UINT4 and weights.converts_uint4:
        return ("bfloat16",)  # the only dtype with which vllm-gaudi uses the operator
    return ()


def is_native(format: CheckpointFormat, dtype: torch.dtype, requested: str | None, weights: Weights) -> bool:
    """Whether linear layers in a format stay quantized.

    4-bit integers stay quantized only on request, because converting them at each step saves memory but no time.

    Args:
        requested: The value of the `weight_kernels` option.
    """
    takes_part = requested == NATIVE or (requested is None and format.native == FP8)
    return takes_part and dtype_name(dtype) in native_inputs(format, weights)


def choose_kernels(vllm_config: VllmConfig, model: ModelConfig, backend: DeviceBackend) -> None:
    """Choose the kernels for a quantized model.

    If the user requests reference kernels, the model is dequantized. Otherwise, the device's own kernels are used if it
    has any, and vLLM's kernels are used if they run on the device or if the user requests native kernels.
    """
    requested = Options.from_vllm(vllm_config).weight_kernels
    if model.quantization != DEQUANTIZED:
        return
    if requested == REFERENCE:
        _report_dequantized(model, "as weight_kernels requests")
    elif not _stays_native(model, requested, backend.weights):
        _choose_vllms(vllm_config, model, requested, backend.weights)


def _stays_native(model: ModelConfig, requested: str | None, weights: Weights) -> bool:
    if (format := format_if_read(model)) is None:
        return False
    method, inputs = method_of(described(model)), native_inputs(format, weights)
    if is_native(format, model.dtype, requested, weights):
        logger.info_once(
            "%s: linear layers in %s stay %s; other quantized weights become %s while they are loaded.",
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
    """Let vLLM's own method load the model, or log why the model is dequantized instead."""
    method = method_of(described(model))
    is_target, quant_config = model is vllm_config.model_config, vllm_config.quant_config
    try:
        _leave_to_vllm(vllm_config, model)
        reason = None if requested == NATIVE else weights.missing_kernel(vllm_config, model)
    # vLLM may reject the format or dtype, and a malformed `quantization_config` may cause other errors.
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = in_one_line(error)
        if requested == NATIVE:
            raise UnsupportedConfigError(
                f"{model.model} has quantized weights ({method}), which vLLM's kernels do not support ({reason}); "
                "leave weight_kernels out."
            ) from error
    if reason is None:
        logger.info_once(
            "%s: weights in %s are not converted, because vLLM's own kernels use them.", model.model, method
        )
        return
    _report_dequantized(model, f"vLLM's own kernels: {reason}")
    model.quantization = DEQUANTIZED
    if is_target:
        vllm_config.quant_config = quant_config


def _report_dequantized(model: ModelConfig, reason: str) -> None:
    logger.info_once(
        "%s: weights in %s become %s while they are loaded (%s).",
        *(model.model, method_of(described(model)), dtype_name(model.dtype), reason),
    )


def _leave_to_vllm(vllm_config: VllmConfig, model: ModelConfig) -> None:
    from vllm.config import VllmConfig as Config

    token = _left_to_vllm.set(True)
    try:
        model.quantization = None
        model._verify_quantization()
        if model is vllm_config.model_config:
            vllm_config.quant_config = Config.get_quantization_config(model, vllm_config.load_config)
    finally:
        _left_to_vllm.reset(token)


def format_of(model: ModelConfig) -> CheckpointFormat:
    return read_format(described(model))


def format_if_read(model: ModelConfig) -> CheckpointFormat | None:
    """Return a checkpoint's quantization format, or None if it is unquantized or if its format is not supported."""
    try:
        return format_of(model) if described(model) else None
    except UnknownFormatError:
        logger.debug(
            "The quantized format of %s is not known to this plugin; vLLM checks it.", model.model, exc_info=True
        )
        return None


def described(model: ModelConfig) -> dict[str, Any]:
    """Return a checkpoint's `quantization_config`, or an empty dictionary if it has none."""
    found: dict[str, Any] | None = model.model_arch_config.quantization_config
    return found or {}


def read_weights(
    tensors: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, loaded: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights for a model, given the tensors in its files. `loaded` is the model that will receive them."""
    if model.quantization != DEQUANTIZED:
        format = format_if_read(model)
        return iter(tensors) if format is None else check_tensors(model.model, format, tensors)
    from vllm.config import get_current_vllm_config

    format, requested = format_of(model), Options.from_vllm(get_current_vllm_config()).weight_kernels
    checkpoint = Checkpoint(model=model.model, format=format, dtype=model.dtype)
    if is_native(format, model.dtype, requested, device().weights):
        checkpoint.is_native = native_layers(loaded, format)
    if (is_unused := getattr(loaded, "is_unused_checkpoint_weight", None)) is not None:
        checkpoint.is_unused = is_unused
    _forget_format(loaded)
    return checkpoint.weights(tensors)


def _forget_format(loaded: Any) -> None:
    """Remove the quantization settings from the configuration of vLLM's gpt-oss model.

    The model's class uses the configuration, rather than the quantization method of its layers, to decide how to read
    weights.
    """
    if type(loaded).__name__ != "GptOssForCausalLM":
        return
    for module in (loaded, loaded.model):
        config: Any = copy.copy(module.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        module.config = config


def native_layers(model: nn.Module, format: CheckpointFormat) -> Callable[[str], bool]:
    """Return a predicate that takes a layer's name in the checkpoint and returns whether it stays quantized in
    `model`."""
    from vllm_gaudi_spec.quantization.native_linears import Fp8Linear, Uint4Linear

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
        # Models such as MTP heads rename layers while loading, so compare only the ends of layer names.
        ends = tuple("." + ".".join(name.split(".")[-2:]) for name in names)
        alike = (module for other, module in modules.items() if other.endswith(ends))
        return format.may_be_native(layer) and all(map(is_made_native, alike))

    return stays
