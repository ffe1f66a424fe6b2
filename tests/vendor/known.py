"""Which of vllm-gaudi's tests run on the emulated card, and which of them fail there for which reason.

As a plugin of pytest it expects the listed ones to fail: one that passes is red, as is another that fails.
"""

from fnmatch import fnmatchcase

import pytest

VLLM_GAUDI = "v0.27.0rc0-51-g091bbadd"
"""The version from `git describe` at commit 091bbadda10bee4fd3f6d0efc1844d2610dd2707."""

# The others need models from a hub, test nothing of the card, or, as test_fsdpa_slicing.py, ask for PT_HPU_LAZY_MODE=0.
FILES = (
    "ops/test_hpu_fp8.py",
    "ops/test_hpu_awq.py",
    "ops/test_hpu_gptq.py",
    "ops/test_hpu_fused_moe.py",
    "ops/test_hpu_compressed_tensors.py",
    "ops/test_hpu_custom_op_registration.py",
    "ops/test_hpu_row_parallel_linear.py",
    "ops/test_hpu_gdn_pytorch.py",
    "ops/test_depthwise_conv1d_tpc.py",
    "ops/test_hpu_layernorm.py",
    "ops/test_hpu_rotary_embedding.py",
    "sampler/test_hpu_sampler.py",
    "test_bucketing.py",
    "test_decode_bucket_hybrid.py",
    "test_defragmentation.py",
    "test_flags.py",
    "test_platform.py",
    "test_utils.py",
)

_TOPK = "topk with sorted=False, which bridge 1.19 refuses, and so does the hostile card (quirk O08)"
_AUTOGRAD = "autograd asks torch's C++ which accelerator there is, and the emulated card is none for it"

_BYTES = (
    "safetensors uploads bytes and views them as e4m3 on the card, which converts numbers in lazy mode (quirk O39); "
    "vllm-gaudi's CI runs in eager mode"
)

# The keys are patterns of test ids.
KNOWN_FAILURES = {
    "ops/test_hpu_fp8.py::test_fp8_linear_method": _BYTES,
    "ops/test_hpu_compressed_tensors.py::test_compressed_tensors_linear_method_w8a8fp8": _BYTES,
    "ops/test_hpu_compressed_tensors.py::test_compressed_tensors_linear_method_w8a8fp8_static_*": _BYTES,
    "ops/test_hpu_fused_moe.py::test_gather_swigluoai_moe_matches_dense*": _TOPK,
    "ops/test_depthwise_conv1d_tpc.py::TestDepthwiseConv1dTpcBfloat16::test_bf16_gradient*": _AUTOGRAD,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in KNOWN_FAILURES.items():
            if fnmatchcase(item.nodeid, f"tests/unit_tests/{pattern}"):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
