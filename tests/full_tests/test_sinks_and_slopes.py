"""Attention sinks (gpt-oss) and ALiBi (BLOOM, Falcon): the greedy tokens of transformers, with drafts and without."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.full_tests.engines import counter, engine
from tests.full_tests.kv_paths import (
    SIZES,
    K,
    check_sinks_are_reloaded,
    check_without_and_with_drafts,
    texts,
    without_drafts,
)
from tests.full_tests.speculation import accepted
from tests.full_tests.tiny_models import VOCAB, common

GPT_OSS, MXFP4, BLOOM = "gpt-oss", "gpt-oss-mxfp4", "bloom"


@pytest.mark.parametrize(
    "case", [GPT_OSS, *(pytest.param(case, marks=pytest.mark.slow) for case in (BLOOM, "falcon-alibi", MXFP4))]
)
def test_sinks_and_alibi_equal_transformers(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [GPT_OSS, MXFP4, BLOOM])
def test_sinks_and_alibi_on_two_ranks(case: str, made: Callable[[str], str]) -> None:
    """Each has its own heads' sinks or slopes, and a part of each expert."""
    check_without_and_with_drafts(case, made(case), tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [GPT_OSS, BLOOM])
def test_sinks_and_alibi_with_kv_in_fp8(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case), kv_cache_dtype="fp8")


@pytest.mark.slow
def test_sinks_are_reloaded(made: Callable[[str], str], tmp_path: Path) -> None:
    check_sinks_are_reloaded(made("granite-swa"), tmp_path / "other")


# ---- drafters beside gpt-oss -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [GPT_OSS, BLOOM])
def test_drafter_with_sinks_or_alibi(drafter: str, made: Callable[[str], str]) -> None:
    """A drafter keeps all of its KV, whatever the windows of its layers, and has sinks or slopes as a target has. As
    its own drafter a model is right nearly always."""
    drafting = dict(method="draft_model", model=made(drafter), num_speculative_tokens=K)
    with engine(made(GPT_OSS), speculative_config=drafting, **SIZES) as llm:
        plain = without_drafts(llm)
        assert texts(llm) == plain
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        assert drafter != GPT_OSS or accepted(llm) > 0.95 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads(method: str, made: Callable[[str], str], tmp_path: Path) -> None:
    """Untrained: what they draft is refused by the target, mostly, and the text stays what it is."""
    save_head(method, tmp_path)
    drafting = dict(method=method, model=str(tmp_path), num_speculative_tokens=K)
    with engine(made(GPT_OSS), speculative_config=drafting, **SIZES) as llm:
        plain = without_drafts(llm)
        assert texts(llm) == plain
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 0


def save_head(method: str, folder: Path) -> None:
    """Of random weights, with the sizes of the tiny gpt-oss."""
    described = common(num_hidden_layers=1, model_type="llama", hidden_act="silu", rms_norm_eps=1e-5)
    hidden, inner, kv = described["hidden_size"], described["intermediate_size"], 64
    is_eagle3 = method == "eagle3"
    layer, reads = ("midlayer", 2 * hidden) if is_eagle3 else ("layers.0", hidden)
    shapes = {
        "fc": (hidden, 2 * hidden),
        f"{layer}.self_attn.q_proj": (hidden, reads),
        f"{layer}.self_attn.k_proj": (kv, reads),
        f"{layer}.self_attn.v_proj": (kv, reads),
        f"{layer}.self_attn.o_proj": (hidden, hidden),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
    }
    norms = [f"{layer}.post_attention_layernorm"]
    if is_eagle3:
        shapes |= {"fc": (hidden, 3 * hidden), "lm_head": (VOCAB, hidden)}
        norms += [f"{layer}.hidden_norm", f"{layer}.input_layernorm", "norm"]
        described |= dict(
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=VOCAB,
            # Of a model of two layers: before the first, between them, and after the last.
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        )
    else:
        described |= dict(architectures=["LlamaForCausalLM"])
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
