"""Single layers of vLLM's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.compat.patching import do_nothing, wrap

if TYPE_CHECKING:
    import torch


def build_olmo_layers_without_triton() -> None:
    """Let the recurrent layers of OLMo hybrid be built where Triton is missing.

    Reason: vLLM's constructor gives Triton an allocator for its kernels, none of which is called here: our class, which
    is registered out of tree, has torch operations in their place. Without Triton that is an AttributeError.
    Remove when: the constructor of `OlmoHybridGatedDeltaNetAttention` does not ask for Triton.
    """
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

    wrap(olmo_gdn_linear_attn, "set_triton_allocator", do_nothing)


def load_olmo_norms_by_their_published_names() -> None:
    """Let OLMo hybrid load the norms of its recurrent layers as transformers writes them.

    Reason: transformers saves them under the names of OLMo-core (`conversion_mapping.py`, "olmo_hybrid"), and vLLM has
    those of transformers' modules alone: such a checkpoint ends with "There is no module or parameter named".
    Remove when: the mapper of `OlmoHybridModel` has both names.
    """
    from vllm.model_executor.models.olmo_hybrid import OlmoHybridModel
    from vllm.model_executor.models.utils import WeightsMapper

    # Idempotent: the same names again.
    OlmoHybridModel.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_substr=_OLMO_NORMS)


_OLMO_NORMS = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}


def scale_falcon_gates_in_new_tensors() -> None:
    """Let the MLPs of Falcon-H1 multiply their gates into a new tensor.

    Reason: vLLM's multiplies half of a tensor in place, and HPU graphs do not support in-place writes through views
    (Intel's documentation of HPU Graphs, limitations).
    Remove when: `FalconH1MLP.forward` updates no view.
    """
    from vllm.model_executor.models.falcon_h1 import FalconH1MLP

    wrap(FalconH1MLP, "forward", _scale_gates)


def _scale_gates(original: Callable[..., torch.Tensor], mlp: Any, x: torch.Tensor) -> torch.Tensor:
    import torch

    gate, up = mlp.gate_up_proj(x)[0].chunk(2, dim=-1)
    scaled = torch.cat((gate * mlp.gate_multiplier, up), dim=-1)
    output: torch.Tensor = mlp.down_proj(mlp.act_fn(scaled))[0] * mlp.down_multiplier
    return output
