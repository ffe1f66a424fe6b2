"""KV in FP8 by --kv-cache-dtype on the CPU: drafts change nothing, whatever drafts and whatever keeps the KV."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.full_tests import heads
from tests.full_tests.engines import SMALL_KV, counter, engine, preemptions
from tests.full_tests.quantized import check_drafts, drafting
from tests.full_tests.speculation import ngram
from tests.models.formats import kernels, rewrite
from vllm_gaudi_spec.config import REFERENCE
from vllm_gaudi_spec.quantization.layers import KV_DTYPE

FP8, NUM_KV_HEADS = "ct-fp8-dynamic", 2
STRICT = dict(rejection_sample_method="strict")
# Prompts of up to 150 tokens are chunks; blocks have 32.
SIZES: dict[str, Any] = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


def test_drafts_are_lossless(looping_llama: str) -> None:
    """Chunks, blocks out of the prefix cache, and verify steps beside each other."""
    options = dict(kv_cache_dtype="fp8", enable_prefix_caching=True)
    with engine(looping_llama, speculative_config=drafting(looping_llama), **options, **SIZES) as llm:
        check_drafts(llm, least=50)
        assert counter(llm, "vllm:prefix_cache_hits") > 100
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 100


@pytest.mark.slow
def test_drafts_are_lossless_after_preemption(looping_llama: str) -> None:
    """What comes again was written by chunks instead of steps."""
    options = SIZES | SMALL_KV | dict(kv_cache_memory_bytes=1 << 18, kv_cache_dtype="fp8")
    with engine(looping_llama, speculative_config=drafting(looping_llama), **options) as llm:
        check_drafts(llm, least=50)
        assert preemptions(llm) > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_heads_are_lossless(method: str) -> None:
    head = heads.head(method, 3, **STRICT)
    with engine(heads.target(method), speculative_config=head, kv_cache_dtype="fp8_inc", **SIZES) as llm:
        check_drafts(llm, least=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3", "gemma3", "qwen3-moe"])
def test_latent_windowed_and_moe_layers_are_lossless(family: str, made: Callable[[str], str]) -> None:
    with engine(made(family), speculative_config=ngram(3, **STRICT), kv_cache_dtype="fp8_e4m3", **SIZES) as llm:
        check_drafts(llm, least=-1)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "weights", "num_ranks"),
    [
        pytest.param("tensor", None, 1, marks=slow),
        pytest.param("attn_head", None, 1, marks=slow),
        pytest.param("tensor", FP8, 1, marks=slow),
        ("attn_head", FP8, 1),
        pytest.param("attn_head", FP8, 2, marks=slow),
    ],
)
def test_kv_scales_of_a_checkpoint_are_used(
    strategy: str, weights: str | None, num_ranks: int, looping_llama: str, tmp_path: Path
) -> None:
    """llm-compressor's form, with KV quantized alone, or beside weights that are dequantized while they are read;
    without an option, as in vLLM."""
    model = with_kv_scales(looping_llama, tmp_path / "scaled", strategy, weights=weights)
    options = SIZES | kernels(REFERENCE) | dict(tensor_parallel_size=num_ranks)
    with engine(model, speculative_config=drafting(model), **options) as llm:
        check_drafts(llm, least=50)
        ranks = llm.collective_rpc(scales_of_layers)
    for rank, scales in enumerate(ranks):
        assert len(scales) == 8  # keys and values of two layers of each model
        for index, (dtype, found) in enumerate(scales):
            expected = _scales("kv"[index % 2], NUM_KV_HEADS if strategy == "attn_head" else 1)
            heads_of_rank = expected.chunk(num_ranks)[rank] if strategy == "attn_head" else expected
            assert dtype == str(KV_DTYPE)
            assert found == pytest.approx(heads_of_rank.tolist())


def scales_of_layers(worker: Any) -> list[tuple[str, list[float]]]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [
        (str(layer.kv_cache.dtype), cache.input.scale.flatten().tolist())
        for layer in layers
        for cache in (layer.impl.k_cache, layer.impl.v_cache)
    ]


def _scales(which: str, count: int) -> torch.Tensor:
    return torch.linspace(0.02, 0.03, count) * (2 if which == "v" else 1)


def with_kv_scales(model: str, copy: Path, strategy: str, *, weights: str | None) -> str:
    """`weights`: the format of the others, if they have one."""
    shutil.copytree(model, copy)
    if weights is not None:
        rewrite(copy, weights, copy / "meant")
    config = json.loads((copy / "config.json").read_text())
    quantization = config.get("quantization_config") or dict(
        quant_method="compressed-tensors", format="dense", config_groups={}, ignore=[]
    )
    scheme = dict(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False)
    config["quantization_config"] = quantization | dict(kv_cache_scheme=scheme)
    assert config["num_key_value_heads"] == NUM_KV_HEADS
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(copy / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for which in "kv":
            scales = _scales(which, NUM_KV_HEADS)[:, None, None] if strategy == "attn_head" else _scales(which, 1)
            tensors[f"model.layers.{layer}.self_attn.{which}_scale"] = scales
            tensors[f"model.layers.{layer}.self_attn.{which}_zero_point"] = torch.zeros_like(scales)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)
