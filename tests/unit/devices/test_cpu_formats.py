"""What this CPU computes with is let in; what it lacks a kernel for is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import _custom_ops  # noqa: F401  (brings the build's operations)
from vllm.platforms import current_platform

from tests.unit.quantization.test_kv_scheme import COMPRESSED, checkpoint, configured
from vllm_gaudi_spec.config import UnsupportedConfigError

INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, dynamic=False)
W4A16 = COMPRESSED | dict(format="pack-quantized", config_groups=dict(group_0=dict(targets=["Linear"], weights=INT4)))
AWQ = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")
STATIC_FP8 = dict(quant_method="fp8", activation_scheme="static")


@pytest.fixture(autouse=True)
def bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "supported_dtypes", [torch.float32, torch.bfloat16])


def test_int8_is_let_in(tmp_path: Path) -> None:
    assert configured(checkpoint(tmp_path, dict(COMPRESSED))).model_config.quantization == "compressed-tensors"


# Operations that a format needs, and whether this build has them: the one for AVX2 has others than that for AVX-512.
HAS_4_BITS = hasattr(torch.ops._C, "cpu_gemm_wna16")
HAS_STATIC_FP8 = bool(torch.ops._C.static_scaled_fp8_quant.default._schema.arguments)


@pytest.mark.parametrize(
    ("quantization", "dtype", "is_served"),
    [
        pytest.param(W4A16, "float32", HAS_4_BITS, id="compressed-tensors, 4 bits"),
        pytest.param(AWQ, "bfloat16", HAS_4_BITS, id="awq"),
        pytest.param(STATIC_FP8, "bfloat16", HAS_STATIC_FP8, id="static fp8"),
    ],
)
def test_formats_without_a_kernel_are_refused(
    quantization: dict[str, Any], dtype: str, is_served: bool, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path, dict(quantization))
    if is_served:
        configured(model, dtype=dtype)
        return
    with pytest.raises(
        UnsupportedConfigError, match=r"for which vLLM has no kernel on this CPU.*; use a model"
    ) as refused:
        configured(model, dtype=dtype)
    assert len(str(refused.value).splitlines()) == 1
