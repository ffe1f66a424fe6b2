"""The quantization method `dequantized` for vLLM, whose layers match those of an unquantized model.

While vLLM creates the configuration, it first asks this method whether it handles a checkpoint's `quantization_config`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_gaudi_spec.config import E4M3_MAX, Options
from vllm_gaudi_spec.quantization.dequantized import DEQUANTIZED, device, is_left_to_vllm, is_native
from vllm_gaudi_spec.quantization.formats import FORMATS, UINT4, method_of, read_format
from vllm_gaudi_spec.quantization.kv_scheme import BY_HEAD
from vllm_gaudi_spec.upstream.quantization import QuantizationConfig, make_kv_cache_method, register_quantization_config

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_spec.upstream.models import WeightsMapper
    from vllm_gaudi_spec.upstream.quantization import QuantizeMethodBase

# vLLM's other names for these formats, including variants that it distinguishes.
_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mxfp8")
_VLLMS_NAMES = {
    "awq": ("auto_awq",),
    "gptq": ("auto_gptq",),
    "auto-round": ("inc",),
    **dict.fromkeys(_MODELOPT, _MODELOPT),
    "mxfp4": ("gpt_oss_mxfp4",),
}


def _rename(name: str, renaming: WeightsMapper) -> str:
    if name.startswith("re:"):
        return name
    # Map the name as that of a tensor, because the prefixes in a mapper end with dots.
    return str(renaming.map_name(f"{name}.weight")).removesuffix(".weight")


@register_quantization_config(DEQUANTIZED)
class DequantizedConfig(QuantizationConfig):
    def __init__(self, written: dict[str, Any] | None = None) -> None:
        """Store the checkpoint's `quantization_config`."""
        super().__init__()
        self._written = written or {}
        self._renamings: list[WeightsMapper] = []
        # vLLM reads this attribute.
        self.kv_cache_scheme = self._written.get("kv_cache_scheme")
        # vLLM sets this attribute to the number of heads in the whole model, in order to split heads among ranks.
        self.total_num_heads = self._written.get("total_num_heads")
        self.total_num_kv_heads = self._written.get("total_num_kv_heads")
        self._has_scales_by_head = (self.kv_cache_scheme or {}).get("strategy") == BY_HEAD

    @classmethod
    def get_name(cls) -> Any:
        return DEQUANTIZED

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DequantizedConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        if is_left_to_vllm() or (method := method_of(hf_quant_cfg)) not in FORMATS:
            return None
        if user_quant not in (None, DEQUANTIZED, method, *_VLLMS_NAMES.get(method, ())):
            return None  # let vLLM accept or reject it
        return DEQUANTIZED  # unreadable variants are rejected later, with a reason

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        # config.json refers to layers by their names in the checkpoint, but vLLM uses their names in the model.
        self._renamings.append(hf_to_vllm_mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        # Import layers late, because this module is also imported in processes that do not need them.
        from vllm_gaudi_spec.upstream.layers import Attention, LinearBase, MLAAttention, UnquantizedLinearMethod

        if isinstance(layer, LinearBase):
            return self._native_linear(prefix) or UnquantizedLinearMethod()
        if isinstance(layer, Attention | MLAAttention):
            # This method reads KV scales, and per-head scales are sharded across tensor-parallel ranks.
            return make_kv_cache_method(self, has_scales_by_head=self._has_scales_by_head)
        return None  # vLLM's default method for unquantized experts and embeddings

    def _native_linear(self, prefix: str) -> QuantizeMethodBase | None:
        from vllm.config import get_current_vllm_config

        from vllm_gaudi_spec.quantization.native_linears import Fp8Linear, Uint4Linear

        weights, requested = device().weights, Options.from_vllm(get_current_vllm_config()).weight_kernels
        format = read_format(self._written)
        for renaming in self._renamings:
            format = replace(format, ignored=tuple(_rename(name, renaming) for name in format.ignored))
        if not is_native(format, torch.get_default_dtype(), requested, weights):
            return None
        *path, name = prefix.split(".")
        parts = self.packed_modules_mapping.get(name, [name])
        if not all(format.may_be_native(".".join((*path, part))) for part in parts):
            return None
        if format.native == UINT4:
            assert format.default is not None
            return Uint4Linear(convert=weights.from_uint4, group_size=format.default.group_size, prefix=prefix)
        assert weights.fp8_arithmetic is not None
        assert weights.fp8_range is not None  # every device with FP8 matmuls has a range
        largest = E4M3_MAX[weights.fp8_range]
        return Fp8Linear(arithmetic=weights.fp8_arithmetic, largest=largest, prefix=prefix)

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        from vllm_gaudi_spec.upstream.models import WeightsMapper

        older = {f".{kind}_proj.output_scale": f".attn.{kind}_scale" for kind in "qkv"}
        older[".self_attn.prob_output_scale"] = ".self_attn.attn.prob_scale"
        return WeightsMapper(orig_to_new_suffix=older) | QuantizationConfig.get_cache_scale_mapper()
