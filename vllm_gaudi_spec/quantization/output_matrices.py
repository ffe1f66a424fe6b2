"""FP8 copies of a drafter's output matrices (`draft_lm_head_quantization`). The target uses the original matrices."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm_gaudi_spec.config import E4M3_MAX, UnsupportedConfigError
from vllm_gaudi_spec.quantization.native_linears import Fp8Linear
from vllm_gaudi_spec.upstream.layers import LogitsProcessor, VocabParallelEmbedding


class Fp8Copy(nn.Module):
    """A copy of this rank's part of an output matrix, with the attributes that `LogitsProcessor` reads."""

    def __init__(self, matrix: Any, method: Fp8Linear) -> None:
        super().__init__()
        self._original = (matrix,)  # in a tuple, so that it is not a submodule of the copy
        self.quant_method, self.tp_size = method, matrix.tp_size
        parts = [part.to(matrix.weight.device) for part in method.quantize(matrix.weight.data)]
        self.weight, self.weight_scale = (nn.Parameter(part, requires_grad=False) for part in parts)

    def refresh(self) -> None:
        """Quantize the matrix again, in place."""
        parts = self.quant_method.quantize(self._original[0].weight.data)
        for parameter, part in zip((self.weight, self.weight_scale), parts, strict=True):
            parameter.data.copy_(part)


def quantize_output_matrices(model: Any, weights: Any, name: str) -> None:
    """Make a drafter compute logits with FP8 copies of its output matrices. The originals may belong to its target."""
    modules = model.named_modules(remove_duplicate=False)
    matrices = {one for path, one in modules if path.endswith("head") and isinstance(one, VocabParallelEmbedding)}
    if not matrices or any(matrix.weight.dim() != 2 or matrix.weight.itemsize == 1 for matrix in matrices):
        raise UnsupportedConfigError(
            f"{name} has no unquantized output matrix that is named lm_head; leave out draft_lm_head_quantization."
        )
    method = Fp8Linear(arithmetic=weights.fp8_logits, largest=E4M3_MAX[weights.fp8_range], prefix="lm_head")
    copies = {matrix: Fp8Copy(matrix, method) for matrix in matrices}
    for module in model.modules():
        if isinstance(module, LogitsProcessor):  # other matrices, such as DSpark's bias, may also be passed here
            module.register_forward_pre_hook(lambda _, args: (copies.get(args[0], args[0]), *args[1:]))
    model.fp8_output_matrices = nn.ModuleList(copies.values())
