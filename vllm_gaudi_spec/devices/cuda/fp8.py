"""FP8 matmuls for a drafter's output matrix, using torch's kernel. FP8 was not measured for other layers."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.attention.operations import PLAIN
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization.fp8 import to_e4m3

_WITH_FP8 = (8, 9)
"""The minimum compute capability that supports FP8."""


class CudaArithmetic:
    """Implements `quantization.fp8.Arithmetic` with torch's e4m3 dtype."""

    matmul = PLAIN.matmul_qk

    def __init__(self, largest: float) -> None:
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < _WITH_FP8:
            raise UnsupportedConfigError(
                "draft_lm_head_quantization needs a GPU with FP8 support, Ada or newer; leave it out of "
                "--speculative-config."
            )
        self._largest = largest

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return to_e4m3(x.float() * inverse, self._largest)

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        if any(size % 16 for size in weight_KN.shape):
            raise UnsupportedConfigError(
                f"draft_lm_head_quantization needs sizes that are multiples of 16 on a GPU, and a rank's part of the "
                f"output matrix has {tuple(weight_KN.shape)}; leave it out of --speculative-config."
            )
        return weight_KN.t().contiguous().t()  # in column-major order, which the kernel requires for its second operand

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        # Return float32 logits as without FP8, because in `dtype` the two best logits would often be equal. With a
        # float32 result, the kernel does not support row and column scales, so apply these afterwards.
        one = torch.ones((), device=x.device)
        out: torch.Tensor = torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.float32)
        return out * (x_scale * y_scale)

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.float() * scale).to(dtype)
