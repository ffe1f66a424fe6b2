"""Attention sinks (gpt-oss) and ALiBi (BLOOM, Falcon): the greedy tokens of transformers, with drafts and without."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import accepted, ngram
from tests.full_tests.tiny_models import VOCAB, common
from tests.models import checkpoints
from tests.models.run import CASES
from vllm_gaudi_spec.config import REQUEST_OPTION

GPT_OSS, BLOOM = "gpt-oss", "bloom"
K = 3
NUM_TOKENS = 24
# Few shapes: on an emulated card each is a program.
SIZES: dict[str, Any] = dict(
    max_num_seqs=4, max_model_len=512, max_num_batched_tokens=256, enable_prefix_caching=True, skip_tokenizer_init=True
)
all_cases = pytest.mark.parametrize(
    "case",
    [GPT_OSS, *(pytest.param(case, marks=pytest.mark.slow) for case in (BLOOM, "falcon-alibi", "gpt-oss-mxfp4"))],
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda case: str(checkpoints.make(case, CASES[case], folder)))


def prompts() -> list[list[int]]:
    """Within a block, over a block's end, and in two chunks of which the second reads the first; the last two share
    it."""
    found = random_prompts([5, 120, 300], VOCAB)
    return [*found, found[-1][:290] + found[0]]


def texts(llm: LLM, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **options)
    asked = prompts()
    found = first_tokens(generate(llm, asked[:-1], params)) + first_tokens(generate(llm, asked[-1:], params))
    assert counter(llm, "vllm:prefix_cache_hits") > 0
    return found


def without_drafts(llm: LLM) -> list[list[int]]:
    return texts(llm, extra_args={REQUEST_OPTION: 0})


def check(case: str, folder: str, found: list[list[int]]) -> None:
    # transformers has no reader of MXFP4 without a GPU: what such weights stand for is beside them.
    plain = Path(folder).parent / "plain"
    reference, tally = Reference(str(plain) if plain.exists() else folder), Tally()
    for prompt, output in zip(prompts(), found, strict=True):
        tally.greedy(f"{case}, prompt of {len(prompt)}", output, reference.logits_after(prompt, output))
    tally.check()


def check_without_and_with_drafts(case: str, folder: str) -> None:
    with engine(folder, speculative_config=ngram(K), **SIZES) as llm:
        plain = without_drafts(llm)
        assert accepted(llm) == 0
        assert llm.reset_prefix_cache()
        assert texts(llm) == plain
        assert accepted(llm) > 0
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1
    check(case, folder, plain)


@all_cases
def test_every_kv_path(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case))


@pytest.mark.emulated
@pytest.mark.every_card
@all_cases
def test_on_an_emulated_card(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case))


# ---- drafters beside gpt-oss -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [GPT_OSS, BLOOM])
def test_draft_models(drafter: str, made: Callable[[str], str]) -> None:
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
