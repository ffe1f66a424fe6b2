"""A layer of latent attention against transformers: prompts in chunks, then verify steps, over paged KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.attention.latent import LatentAttention
from vllm_gaudi_spec.attention.metadata import Blocks, build_rectangle
from vllm_gaudi_spec.devices import load_backend
from vllm_gaudi_spec.platforms.attention import LatentAttentionBackend

HEADS, NOPE, ROPE, VALUE, RANK, HIDDEN = 4, 24, 16, 20, 40, 64
BLOCK = 16


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def reference_layer() -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return DeepseekV3Attention(config, 0).eval(), DeepseekV3RotaryEmbedding(config)


def our_layer(theirs: DeepseekV3Attention) -> LatentAttention:
    kv_b_proj = torch.nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
    kv_b_proj.weight = torch.nn.Parameter(theirs.kv_b_proj.weight.clone(), requires_grad=False)
    kv_b_proj.quant_method = UnquantizedLinearMethod()
    layer = MLAAttention(
        num_heads=HEADS,
        scale=theirs.scaling,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        kv_b_proj=kv_b_proj,
        prefix="layers.0.attn",
        attn_backend=LatentAttentionBackend,
    )
    layer.__class__ = LatentAttention
    layer.process_weights_after_loading(torch.float32)
    return layer


@torch.inference_mode()
def test_latent_layer_equals_transformers(config: VllmConfig) -> None:
    theirs, rotary = reference_layer()
    ours = our_layer(theirs)
    lengths = [53, 30]
    hidden = torch.randn(2, max(lengths), HIDDEN)
    positions = torch.arange(max(lengths))[None].expand(2, -1)
    cos, sin = rotary(hidden, positions)
    mask = torch.full((max(lengths), max(lengths)), -torch.inf).triu(1)[None, None]
    expected = theirs(hidden, (cos, sin), mask)[0]

    query = theirs.q_proj(hidden).unflatten(-1, (HEADS, -1))
    latent, rope = theirs.kv_a_proj_with_mqa(hidden).split((RANK, ROPE), dim=-1)
    latent = theirs.kv_a_layernorm(latent)
    turned, rope = apply_rotary_pos_emb_interleave(query[..., NOPE:], rope.unsqueeze(2), cos, sin, unsqueeze_dim=2)
    query = torch.cat((query[..., :NOPE], turned), dim=-1)

    kv_cache = torch.zeros(12, 1, BLOCK, RANK + ROPE)
    ours.bind_kv_cache(kv_cache)
    ours.impl.bind(ours, kv_cache, load_backend())
    table = torch.tensor([[3, 7, 1, 9], [5, 2, 11, 0]], dtype=torch.int32)
    attended = torch.zeros(2, max(lengths), HEADS * VALUE)
    done = [0, 0]
    # Chunks of a prompt, then steps of a token and three drafts; the last ones have fewer real tokens.
    for queries in (20, 4, 4, 20, 5):
        real = [min(queries, length - start) for length, start in zip(lengths, done, strict=True)]
        inputs = build_rectangle(
            torch.zeros(2, queries, dtype=torch.int64),
            torch.tensor(done, dtype=torch.int32),
            torch.tensor(real, dtype=torch.int32),
            Blocks((torch.nn.functional.pad(table, (0, 2)),), (BLOCK,)),
            row_operations.TORCH,
        )
        # Padding returns arbitrary numbers, and writes to the pad block.
        places = (torch.tensor(done)[:, None] + torch.arange(queries)).clamp(max=max(lengths) - 1)
        rows = torch.arange(2)[:, None]
        names = {ours.layer_name: inputs.calls[0]}
        with set_forward_context(names, config, slot_mapping={ours.layer_name: inputs.slots[0]}):
            out = ours(*(x[rows, places].flatten(0, 1) for x in (query, latent, rope)))
        for row, count in enumerate(real):
            attended[row, done[row] : done[row] + count] = out.unflatten(0, (2, queries))[row, :count]
            done[row] += count
    assert done == lengths
    result = theirs.o_proj(attended)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(result[row, :length], expected[row, :length], atol=1e-6, rtol=1e-5)
