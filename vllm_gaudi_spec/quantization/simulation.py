"""Simulates Intel Neural Compressor (INC), which requires a real Gaudi, on the CPU and on the emulated Gaudi.

The simulation selects the same modules as INC, by name and class, and uses the same files. The code that measures
modules is in `calibration/`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from vllm.logger import init_logger

from vllm_gaudi_spec.config import E4M3_MAX, GAUDI2, UnsupportedConfigError
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.config import NEEDS_CALIBRATION, LoadContext, Measuring, QuantConfig
from vllm_gaudi_spec.quantization.fingerprint import fingerprint
from vllm_gaudi_spec.quantization.fp8 import Arithmetic, to_e4m3
from vllm_gaudi_spec.quantization.layers import (
    KV_DTYPE,
    CalibratedLinear,
    Fp8Cache,
    Fp8Matmul,
    Fp8Softmax,
    serve_linear,
)

logger = init_logger(__name__)

SUMS, LOGITS = "RowParallelLinear", "ParallelLMHead"
LINEARS = (
    "Linear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    SUMS,
    LOGITS,
)
MATMUL, SOFTMAX, CACHE = "Matmul", "Softmax", "VLLMKVCache"
CACHE_OF = {"matmul_qk": "k_cache", "matmul_av": "v_cache"}
"""Maps each matmul to the cache that provides its second operand."""


Measure = Callable[[nn.Module, QuantConfig, LoadContext], Measuring]
measure: Measure | None = None
"""The function that measures a model. `calibration/` sets it in the worker processes of its engine."""


class Found(NamedTuple):
    name: str
    kind: str
    module: Any
    """A layer from vLLM or torch."""
    parent: Any

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


def find_modules(model: nn.Module, quant_config: QuantConfig, apart: Collection[nn.Module] = ()) -> Iterator[Found]:
    """Yield the modules of a model that INC would select, except those in `apart`."""
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind in (*LINEARS, MATMUL, SOFTMAX, CACHE) and quant_config.takes(name, kind) and module not in apart:
            yield Found(name, kind, module, model.get_submodule(name.rpartition(".")[0]))


def apply(
    model: nn.Module, quant_config: QuantConfig, load_context: LoadContext, arithmetic: Callable[[float], Arithmetic]
) -> Measuring | None:
    """Implement `Weights.quantize`. `arithmetic` takes the maximum e4m3 value and returns the FP8 arithmetic to use."""
    try:
        if quant_config.measures:
            if measure is None:
                raise UnsupportedConfigError(f"{quant_config.option}: {NEEDS_CALIBRATION}")
            return measure(model, quant_config, load_context)
        quantize(model, quant_config, load_context, arithmetic)
    except files.QuantFilesError as error:
        raise UnsupportedConfigError(f"{quant_config.option}: {error}.") from None
    return None


def quantize(
    model: nn.Module,
    quant_config: QuantConfig,
    load_context: LoadContext,
    arithmetic: Callable[[float], Arithmetic],
) -> None:
    """Replace modules of a model with FP8 modules that use the scales in the model's scale files."""
    prefix = quant_config.dump_stats_path
    record = files.read_world(prefix, load_context.world, quant_config.scale_method)[load_context.rank]
    loaded = fingerprint(load_context.model) if record.model else ""
    if loaded and loaded != record.model:
        raise files.QuantFilesError(f"the scales at {prefix} are for a different model than {load_context.model}")
    fp8_range = load_context.fp8_range or record.device or GAUDI2
    if record.device and record.device != fp8_range:
        raise files.QuantFilesError(
            f"the scales at {prefix} are for {record.device}, but this device computes like {fp8_range}"
        )
    scales, largest = record.nodes, E4M3_MAX[fp8_range]
    chosen = list(find_modules(model, quant_config, load_context.apart))
    _check_scales_exist(quant_config, chosen, scales)
    served = [found for found in chosen if found.name in scales]
    _check_cache_pairs(quant_config, served)
    for found in served:
        node = scales[found.name]
        try:
            _replace(found, node, largest, arithmetic(largest))
        except (IndexError, KeyError, _WrongScales):
            raise files.QuantFilesError(
                f"the scales of {found.name} at {prefix} do not fit the module; they are for a different model or "
                "number of ranks"
            ) from None
    logger.info(
        "%s: %d modules run in FP8 (e4m3 up to %d, %s) with scales by %s.",
        quant_config.option,
        len(served),
        largest,
        fp8_range,
        quant_config.scale_method,
    )


class _WrongScales(Exception):
    """Raised for scales that do not match a module."""


def _check_scales_exist(quant_config: QuantConfig, chosen: list[Found], scales: dict[str, files.Node]) -> None:
    unknown = [found.name for found in chosen if found.name not in scales]
    if unknown and (not quant_config.skips_unknown or len(unknown) == len(chosen)):
        raise files.QuantFilesError(
            f"{len(unknown)} of {len(chosen)} modules have no scales at {quant_config.dump_stats_path}, the first is "
            f"{unknown[0]}; calibrate this model, or name them in the blocklist of {quant_config.path}"
        )
    if unknown:
        logger.warning("%s: %d modules without scales are not quantized.", quant_config.option, len(unknown))


def _check_cache_pairs(quant_config: QuantConfig, served: list[Found]) -> None:
    caches = {found.name for found in served if found.kind == CACHE}
    for name in sorted(caches):
        parent, _, last = name.rpartition(".")
        for other in CACHE_OF.values():
            if f"{parent}.{other}" not in caches:
                raise files.QuantFilesError(
                    f"{quant_config.path} quantizes {last} of {parent} but not {other}, and KV has only one dtype; "
                    "name both of them, or none"
                )


def _replace(found: Found, node: files.Node, largest: float, arithmetic: Arithmetic) -> None:
    if found.kind in LINEARS:
        weight_NK, scale = found.module.weight.detach(), _weight_scale(node, found.module.weight.shape[0])
        weight_KN = to_e4m3(weight_NK.float().t() * (1 / scale), largest).contiguous()
        serve_linear(
            found.module, CalibratedLinear(found.module, weight_KN, _tensor(node.inputs[0]), scale, arithmetic)
        )
        return
    replaced: nn.Module
    if found.kind == MATMUL:
        replaced = Fp8Matmul(_tensor(node.inputs[0]), _tensor(node.inputs[1]), arithmetic)
    elif found.kind == SOFTMAX:
        replaced = Fp8Softmax(_tensor(node.outputs[0]), arithmetic)
    else:
        replaced = Fp8Cache(_tensor(node.inputs[0]), arithmetic, found.parent.dtype)
        found.parent.kv_dtype = KV_DTYPE
    setattr(found.parent, found.last, replaced)


def _weight_scale(node: files.Node, num_outputs: int) -> torch.Tensor:
    """Return a weight's scale, [] or [N]."""
    weight_scale = node.params["weight"]
    if not isinstance(weight_scale, dict):
        return _tensor(weight_scale)
    by_output = torch.from_numpy(np.asarray(weight_scale[0], dtype=np.float32)).flatten()
    if by_output.numel() != num_outputs or not (by_output > 0).all() or not (np.asarray(weight_scale[1]) == 1).all():
        raise _WrongScales
    return by_output


def _tensor(values: np.ndarray) -> torch.Tensor:
    if values.size != 1 or not (values > 0).all():
        raise _WrongScales
    return torch.tensor(float(values.reshape(-1)[0]), dtype=torch.float32)
