"""Formats with kernels for this CPU stay quantized, and others are dequantized."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import _custom_ops  # noqa: F401  (brings the build's operations)
from vllm.platforms import current_platform

from tests.models.formats import CT_FP8, compressed
from tests.unit.quantization.test_kv_scheme import COMPRESSED, checkpoint, configured
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization.dequantized import DEQUANTIZED
from vllm_gaudi_spec.quantization.method import DequantizedConfig

INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, dynamic=False)
W4A16 = COMPRESSED | dict(format="pack-quantized", config_groups=dict(group_0=dict(targets=["Linear"], weights=INT4)))
AWQ = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")
STATIC_FP8 = dict(quant_method="fp8", activation_scheme="static")


@pytest.fixture(autouse=True)
def bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "supported_dtypes", [torch.float32, torch.bfloat16])


# Whether this build has the operations that a format needs: builds for AVX2 and AVX-512 differ.
HAS_4_BITS = hasattr(torch.ops._C, "cpu_gemm_wna16")
HAS_STATIC_FP8 = bool(torch.ops._C.static_scaled_fp8_quant.default._schema.arguments)

FORMATS = pytest.mark.parametrize(
    ("quantization", "has_kernel"),
    [
        pytest.param(W4A16, HAS_4_BITS, id="compressed-tensors, 4 bits"),
        pytest.param(AWQ, HAS_4_BITS, id="awq"),
        pytest.param(STATIC_FP8, HAS_STATIC_FP8, id="static fp8"),
    ],
)


@FORMATS
def test_formats_without_a_kernel_are_dequantized(
    quantization: dict[str, Any], has_kernel: bool, tmp_path: Path
) -> None:
    found = configured(checkpoint(tmp_path, dict(quantization)), dtype="bfloat16")
    assert (found.model_config.quantization != DEQUANTIZED) == has_kernel
    assert isinstance(found.quant_config, DequantizedConfig) != has_kernel


@FORMATS
def test_requested_native_kernels_are_refused_if_missing(
    quantization: dict[str, Any], has_kernel: bool, tmp_path: Path
) -> None:
    options = dict(dtype="bfloat16", additional_config=dict(gaudi_spec=dict(weight_kernels="native")))
    model = checkpoint(tmp_path, dict(quantization))
    if has_kernel:
        configured(model, **options)
        return
    with pytest.raises(
        UnsupportedConfigError, match=r"for which vLLM has no kernel on this CPU.*; leave weight_kernels out"
    ) as refused:
        configured(model, **options)
    assert len(str(refused.value).splitlines()) == 1


DYNAMIC_FP8 = compressed("float-quantized", *CT_FP8)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize(
    ("quantization", "instructions"),
    [
        pytest.param(DYNAMIC_FP8, "_is_amx_fp16_supported", id="fp8"),
        pytest.param(COMPRESSED, "_is_avx512_supported", id="int8"),
    ],
)
def test_slow_kernels_are_used_only_on_request(
    quantization: dict[str, Any], instructions: str, is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, instructions, lambda: is_fast)
    if instructions == "_is_avx512_supported":  # with AMX vLLM uses another INT8 product
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model = checkpoint(tmp_path, dict(quantization))
    by_default = configured(model, dtype="bfloat16").model_config.quantization
    assert by_default == ("compressed-tensors" if is_fast else DEQUANTIZED)
    native = dict(additional_config=dict(gaudi_spec=dict(weight_kernels="native")))
    assert configured(model, dtype="bfloat16", **native).model_config.quantization == "compressed-tensors"
