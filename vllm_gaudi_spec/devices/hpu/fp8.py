"""FP8 on a Gaudi: arithmetic with the card's operators, and calls to Intel Neural Compressor (INC), which quantizes
models.

The calls to INC have never been run. They are based on INC's sources and on vllm-gaudi. On the emulated card, the FP8
arithmetic is used to simulate INC.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_gaudi_spec.attention.operations import PLAIN, VLLMKVCache
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.config import LoadContext, QuantConfig
from vllm_gaudi_spec.quantization.layers import KV_DTYPE

logger = init_logger(__name__)


class GaudiArithmetic:
    """Implements `quantization.fp8.Arithmetic` with the bridge's operators."""

    matmul = PLAIN.matmul_qk

    def __init__(self, largest: float) -> None:
        self._largest = largest

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        # Clamp first, because neither the card's saturation in casts nor its supported scale shapes are published
        # (quirk Q01).
        multiplier: torch.Tensor | None = None
        if inverse.dim() > 1:
            x = (x.float() * inverse).clamp(-self._largest, self._largest)
        else:
            multiplier, largest = inverse, (self._largest / inverse).to(x.dtype)
            x = torch.clamp(x, -largest, largest)
        values: torch.Tensor = torch.ops.hpu.cast_to_fp8_v2(x, multiplier, False, False, torch.float8_e4m3fn)[0]
        return values

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        return weight_KN

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.hpu.fp8_gemm_v2(x, False, y, False, None, dtype, x_scale, y_scale)
        return out

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if scale.dim() > 1:
            wide: torch.Tensor = torch.ops.hpu.cast_from_fp8(x, None, torch.float32)
            return (wide * scale).to(dtype)
        out: torch.Tensor = torch.ops.hpu.cast_from_fp8(x, scale, dtype)
        return out


# --- INC ---


def prepare_loading() -> None:
    """Prepare the bridge for a model that will be quantized, before its weights are loaded."""
    importlib.import_module("habana_frameworks.torch.core").hpu_inference_set_env()


class Measured:
    """A model that INC is measuring (see `Measuring`). INC's measurements include padding."""

    reads_logits = False

    def __init__(self, inc: Any, model: nn.Module, stem: Path) -> None:
        """Initialize the measurement. `stem` is the common prefix of the paths of INC's files."""
        self._inc, self._model, self._stem = inc, model, stem

    def counting(self, real_T: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self) -> None:
        self._inc.finalize_calibration(self._model)
        # INC keeps a single list for all models in the process. To find this model's modules, use the attribute that
        # INC sets on each module that it measures.
        measured = [name for name, module in self._model.named_modules() if getattr(module, "_mod_extra_config", None)]
        files.write_looked_at(self._stem, [name.replace("_orig_mod.", "") for name in measured])


def apply(model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Measured | None:
    """Implement `Weights.quantize`, which measures or quantizes a model."""
    inc = _import(quant_config)
    with _exclude_modules(model, quant_config, load_context) as path:
        (inc.prepare if quant_config.measures else inc.convert)(model, inc.FP8Config.from_json_file(path))
    model.to("hpu")
    core = importlib.import_module("habana_frameworks.torch.core")
    core.hpu_initialize(model, mark_only_scales_as_const=True)
    if quant_config.measures:
        return Measured(inc, model, files.stem(quant_config.dump_stats_path, load_context.rank, load_context.world))
    module: Any
    for module in model.modules():
        cache = getattr(module, "k_cache", None)
        if cache is not None and type(cache) is not VLLMKVCache:
            module.kv_dtype = KV_DTYPE
    logger.info("%s: the model was quantized by Intel Neural Compressor.", quant_config.option)
    return None


def _import(quant_config: QuantConfig) -> Any:
    try:
        return importlib.import_module("neural_compressor.torch.quantization")
    except ImportError as error:
        raise UnsupportedConfigError(
            f"{quant_config.option}: {quant_config.mode} on a Gaudi needs Intel Neural Compressor ({error}); install "
            "neural-compressor-pt, or leave the option out."
        ) from error


@contextmanager
def _exclude_modules(model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Iterator[str]:
    """Yield the path of INC's configuration file: the user's file, or a copy that excludes more modules if
    `LoadContext.apart` is not empty."""
    apart = [name for name, module in model.named_modules() if name and module in load_context.apart]
    if not apart:
        yield quant_config.path
        return
    blocked = {
        "names": [*quant_config.blocked.names, *(f"^{re.escape(name)}$" for name in apart)],
        "types": list(quant_config.blocked.types),
    }
    rest = {name: value for name, value in quant_config.fields.items() if name != "blacklist"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(rest | {"blocklist": blocked}, file)
        file.flush()
        yield file.name
