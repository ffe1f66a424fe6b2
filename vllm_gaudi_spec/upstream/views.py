"""Patches for layers of vLLM's models that do not work in graphs, or only at additional cost.

These layers change tensors through views, create tensors on the host, or compute in int64. N: heads, D: key size, A:
AltUp states, T: tokens, H: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.upstream.patching import patches, wrap

if TYPE_CHECKING:
    import torch

Original = Callable[..., "torch.Tensor"]


@patches("vllm.model_executor.models.minicpm3:MiniCPM3Attention.forward")
def join_keys_of_minicpm3(
    original: Original, layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor
) -> torch.Tensor:
    """Make MiniCPM3 concatenate the parts of queries and keys.

    Reason: vLLM's layer assigns these parts to slices of a tensor, and HPU graphs do not support in-place writes
    through views (quirk L06).
    Remove when: upstream's layer no longer assigns to slices.
    """
    import torch

    num_heads, size, value_size = layer.num_local_heads, layer.qk_head_dim, layer.v_head_dim
    plain_size, rotary_size = layer.qk_nope_head_dim, layer.qk_rope_head_dim
    query, _ = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden_states)[0]))
    query_plain, query_rotary = query.view(-1, num_heads, size).split([plain_size, rotary_size], dim=-1)
    latent, key_rotary = layer.kv_a_proj_with_mqa(hidden_states)[0].split([layer.kv_lora_rank, rotary_size], dim=-1)
    both, _ = layer.kv_b_proj(layer.kv_a_layernorm(latent))
    key_plain, value = both.view(-1, num_heads, plain_size + value_size).split([plain_size, value_size], dim=-1)
    query_rotary, key_rotary = layer.rotary_emb(positions, query_rotary.flatten(1), key_rotary.contiguous())
    key_rotary = key_rotary.view(-1, 1, rotary_size).expand(-1, num_heads, -1)
    query_TND = torch.cat((query_plain, query_rotary.view(-1, num_heads, rotary_size)), dim=-1)
    key_TND = torch.cat((key_plain, key_rotary), dim=-1)
    value_TND = torch.nn.functional.pad(value, [0, size - value_size])
    attended = layer.attn(query_TND.flatten(1), key_TND.flatten(1), value_TND.flatten(1))
    output, _ = layer.o_proj(attended.view(-1, num_heads, size)[..., :value_size].flatten(1))
    return output


def add_to_states_of_gemma3n() -> None:
    """Make Gemma 3n create new tensors for hidden states and divide by Python numbers.

    Reason: vLLM's layers add to the AltUp states through views (quirk L06) and divide by tensors created on the host,
    which is not allowed in a compiled graph.
    Remove when: upstream's layers no longer do either.
    """
    from vllm.model_executor.models import gemma3n

    wrap(gemma3n.Gemma3nAltUp, "predict", _predict)
    wrap(gemma3n.Gemma3nDecoderLayer, "forward", _decode)
    wrap(gemma3n.Gemma3nSelfDecoder, "altup_embed", _spread)
    wrap(gemma3n.Gemma3nTextModel, "altup_unembed", _gather)


def _predict(original: Original, altup: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the predicted states, which have the same shape [A, T, H] as the input states."""
    modalities_TA = altup._compute_router_modalities(hidden_states[altup.altup_active_idx])
    coefficients_TAA = altup.prediction_coefs(modalities_TA).view(-1, altup.altup_num_inputs, altup.altup_num_inputs)
    change_THA = hidden_states.permute(1, 2, 0) @ coefficients_TAA.transpose(1, 2)
    return (change_THA.permute(2, 0, 1) + hidden_states).contiguous()


def _decode(
    original: Original,
    layer: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    per_layer_input: torch.Tensor,
    **named: Any,
) -> torch.Tensor:
    """Return the layer's output states, which have the same shape [A, T, H] as the input states."""
    import torch

    predictions_ATH = layer.altup.predict(hidden_states)
    active_TH = predictions_ATH[layer.altup_active_idx]
    normed_TH = layer.input_layernorm(active_TH)
    attended_TH = layer.self_attn(positions=positions, hidden_states=normed_TH, **named)
    attended_TH = layer.post_attention_layernorm(attended_TH) + active_TH
    attended_TH = (attended_TH + layer.laurel(normed_TH)) / 2**0.5
    mlp_TH = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(attended_TH)))
    corrected_ATH = layer.altup.correct(predictions_ATH, attended_TH + mlp_TH)
    first_TH = layer.altup.scale_corrected_output(corrected_ATH[layer.altup_active_idx])
    gated = layer.act_fn(layer.per_layer_input_gate(first_TH)) * per_layer_input
    added_TH = layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
    return torch.cat((corrected_ATH[:1], corrected_ATH[1:] + added_TH))


def _spread(original: Original, decoder: Any, hidden_states_0: torch.Tensor) -> torch.Tensor:
    """Return the embedding and its projections, scaled to the magnitude of the embedding, [T, H, A]."""
    import torch

    others = [_scaled(project(hidden_states_0), hidden_states_0) for project in decoder.altup_projections]
    return torch.stack((hidden_states_0, *others), dim=-1)


def _gather(original: Original, model: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the mean [T, H] of the first state and the scaled projections of the others. The states are [T, H, A]."""
    import torch

    first_TH, *others = hidden_states.unbind(-1)
    projected = [project(other) for project, other in zip(model.altup_unembed_projections, others, strict=True)]
    return torch.stack((first_TH, *(_scaled(states, first_TH) for states in projected)), dim=-1).mean(dim=-1)


def _scaled(states_TH: torch.Tensor, like_TH: torch.Tensor) -> torch.Tensor:
    return states_TH * (_magnitude(like_TH) / _magnitude(states_TH))


def _magnitude(states_TH: torch.Tensor) -> torch.Tensor:
    magnitude: torch.Tensor = (states_TH**2).mean(dim=-1, keepdim=True) ** 0.5
    return magnitude


@patches("vllm.model_executor.models.gemma3n:Gemma3nTextModel.forward")
def embed_tokens_by_layer_in_gemma3n(
    original: Original,
    model: Any,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    per_layer_inputs: torch.Tensor | None = None,
    *more: Any,
    **named: Any,
) -> torch.Tensor:
    """Make Gemma 3n compute per-layer embeddings from its input tokens.

    Reason: unless the caller provides per-layer embeddings, vLLM's text model omits them and generates different text.
    The class for published checkpoints does provide them, but an earlier call has to write them through a view.
    Remove when: upstream's models compute the embeddings.
    """
    if per_layer_inputs is None and input_ids is not None:
        decoder, config = model.self_decoder, model.config
        # The last token IDs have no embedding. On integers, `where` is compiled incorrectly (quirk C17).
        ids_T = input_ids * (input_ids < config.vocab_size_per_layer_input)
        embeddings = decoder.embed_tokens_per_layer(ids_T) * decoder.embed_scale_per_layer
        per_layer_inputs = embeddings.view(-1, config.num_hidden_layers, config.hidden_size_per_layer_input)
    return original(model, input_ids, positions, per_layer_inputs, *more, **named)


@patches("vllm.model_executor.models.gemma3n_mm:Gemma3nForConditionalGeneration.forward")
def take_tokens_in_gemma3n(
    original: Original,
    model: Any,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    intermediate_tensors: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    **named: Any,
) -> torch.Tensor:
    """Make Gemma 3n's class for published checkpoints use the token IDs if the input is only text.

    Reason: see `embed_tokens_by_layer_in_gemma3n`.
    Remove when: this class uses the token IDs.
    """
    if inputs_embeds is None and intermediate_tensors is None:
        states: torch.Tensor = model.language_model(input_ids, positions, **named)
        return states
    return original(model, input_ids, positions, intermediate_tensors, inputs_embeds, **named)


@patches("vllm.model_executor.models.falcon_h1:FalconH1MLP.forward")
def scale_gates_of_falcon_h1(original: Original, mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Make Falcon-H1's MLPs store scaled gates in a new tensor.

    Reason: vLLM's MLP scales the gates, which are half of a tensor, in place through a view (quirk L06).
    Remove when: `FalconH1MLP.forward` no longer updates a view.
    """
    import torch

    gate, up = mlp.gate_up_proj(x)[0].chunk(2, dim=-1)
    scaled = torch.cat((gate * mlp.gate_multiplier, up), dim=-1)
    output: torch.Tensor = mlp.down_proj(mlp.act_fn(scaled))[0] * mlp.down_multiplier
    return output


@patches("vllm.model_executor.models.siglip:SiglipVisionEmbeddings.forward")
def add_positions_in_siglip(
    original: Original, embeddings: Any, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False
) -> torch.Tensor:
    """Make Siglip store the sum of patch and position embeddings in a new tensor.

    Reason: vLLM's code adds position embeddings in place to a view of the convolution's output (quirk L06).
    Remove when: `SiglipVisionEmbeddings.forward` no longer updates a view.
    """
    if interpolate_pos_encoding:  # for images of other sizes, for which no graph is captured
        return original(embeddings, pixel_values, interpolate_pos_encoding)
    patches = embeddings.patch_embedding(pixel_values.to(embeddings.patch_embedding.weight.dtype))
    positions: torch.Tensor = embeddings.position_embedding(embeddings.position_ids)
    return patches.flatten(2).transpose(1, 2) + positions


def suppress_tokens_by_bias(model: Any, dtype: torch.dtype) -> None:
    """Make Gemma 4 and its assistant suppress tokens by adding a bias to the logits.

    Reason: vLLM's classes write to the logits by index. They copy the indices to the device in the first step that
    needs them, which may be a graph capture. In addition, Ascend's CANN before about 8.3 reads each index on the host.
    Remove when: their `compute_logits` neither copies indices nor writes by index.
    """
    import torch

    token_ids = getattr(model, "_suppress_token_ids", None)
    if not token_ids:
        return
    model._suppress_token_ids = model._suppress_idx = None
    bias_V = torch.zeros(model.config.get_text_config().vocab_size, dtype=dtype)
    bias_V[token_ids] = -torch.inf
    model.register_buffer("suppression_V", bias_V, persistent=False)
    compute_logits = model.compute_logits

    def suppress(*args: Any, **named: Any) -> torch.Tensor | None:
        logits_NV = compute_logits(*args, **named)
        return None if logits_NV is None else logits_NV + model.suppression_V

    model.compute_logits = suppress


@patches("vllm.model_executor.models.qwen3_dflash2:_grouped_conv")
def convolve_blocks_of_dflash2(
    original: Original,
    hidden_states: torch.Tensor,
    delta: torch.Tensor,
    base: torch.Tensor,
    block_size: int,
    num_groups: int,
    group_size: int,
    taps: int,
) -> torch.Tensor:
    """Make DFlash2's convolution separate blocks by reshaping, without computing each token's position in its block.

    Reason: vLLM computes the positions from int64 token indices, as a remainder if the block size is not a power of
    two.
    Remove when: `_grouped_conv` no longer computes a remainder.
    """
    import torch

    if hidden_states.is_cuda:  # vLLM has a CUDA kernel for this case
        return original(hidden_states, delta, base, block_size, num_groups, group_size, taps)
    tokens_BQGD = hidden_states.view(-1, block_size, num_groups, group_size)
    weights_TPGD = base.view(taps, num_groups, group_size) + delta.unsqueeze(-1)
    weights = weights_TPGD.unflatten(0, (-1, block_size)).unbind(2)
    sums_BQGD = weights[0] * tokens_BQGD
    for tap in range(1, min(taps, block_size)):
        earlier_BQGD = torch.nn.functional.pad(tokens_BQGD[:, :-tap], (0, 0, 0, 0, tap, 0))
        sums_BQGD = sums_BQGD + weights[tap] * earlier_BQGD
    return sums_BQGD.view(hidden_states.shape)
