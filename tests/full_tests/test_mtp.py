"""MTP layers of the families that have them: chained ones too, on targets with recurrent states too."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm import SamplingParams

from tests.full_tests import mtp_checkpoints
from tests.full_tests.engines import SMALL_KV, counter, engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import accepted, accounts, speculating
from tests.full_tests.test_refusals import refusal
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import check_same, mixed_requests, run_together
from tests.models.architectures import ARCHITECTURES
from tests.models.checkpoints import build
from tests.support.marks import slow

DRAFTED = "vllm:spec_decode_num_draft_tokens"
# Chunks of 64 tokens; one prompt has a single token left for its last chunk, others are shorter than a chain.
LENGTHS = [1, 2, 3, 25, 65, 73, 130, 200]
CHUNKED = dict(max_num_batched_tokens=64, block_size=16)
NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize(
    ("family", "layers", "k"),
    [
        *slow(("glm4-moe", 3, 1), ("glm4-moe", 3, 3), ("glm4-moe", 3, 6), ("deepseek-v3", 2, 2), ("deepseek-v3", 2, 4)),
        *slow(*((family, 1, 4) for family in mtp_checkpoints.FAMILIES if not mtp_checkpoints.needs_vision(family))),
        *slow(*((family, 2, 2) for family in mtp_checkpoints.CHAINED)),
    ],
)
def test_every_draft_is_right(family: str, layers: int, k: int, tmp_path: Path) -> None:
    """Where the next token follows from the last one alone, in the target and in its MTP layers alike."""
    model = mtp_checkpoints.save(family, tmp_path, layers, share=0.0)
    check_every_draft(model, dict(method="mtp", num_speculative_tokens=k))


@pytest.mark.parametrize(
    ("target", "k"), [("gemma4-shared-kv", 3), *slow(("gemma4-dense", 1), ("gemma4-k-eq-v", 4), ("gemma4-moe", 2))]
)
def test_every_draft_of_gemma4_assistant_is_right(target: str, k: int, tmp_path: Path) -> None:
    model, assistant = mtp_checkpoints.save_gemma4(target, tmp_path, share=0.0)
    check_every_draft(model, dict(method="mtp", model=assistant, num_speculative_tokens=k))


def test_drafts_go_on_beyond_positions_of_checkpoint(tmp_path: Path) -> None:
    """Longer contexts by --hf-overrides are the MTP layer's too (vllm#52873)."""
    model = mtp_checkpoints.save("qwen3-next", tmp_path, share=0.0)
    described = json.loads((tmp_path / "config.json").read_text())
    longer = {"max_position_embeddings": described["max_position_embeddings"]}
    (tmp_path / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 64}))
    check_every_draft(model, dict(method="mtp", num_speculative_tokens=2), hf_overrides=longer)


def check_every_draft(model: str, config: dict[str, Any], **options: Any) -> None:
    k = config["num_speculative_tokens"]
    options |= CHUNKED
    # Some of vLLM's classes hide the token at position 0.
    prompts = random_prompts(LENGTHS[1:], VOCAB)
    with engine(model, **options) as llm:
        plain = first_tokens(generate(llm, prompts, GREEDY))
    with speculating(model, config, **options) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, GREEDY)
            assert first_tokens(outputs) == plain
            for prompt, (drafted, _) in zip(prompts, accounts(outputs), strict=True):
                # A first token comes without drafts, and so does a last one that is left over.
                assert len(prompt) < 4 or len(drafted) == (NUM_TOKENS - 2 + k) // (k + 1)
        assert accepted(llm) == counter(llm, DRAFTED) > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("deepseek-v3", 3),
        *slow(*((family, 1) for family in mtp_checkpoints.FAMILIES if not mtp_checkpoints.needs_vision(family))),
        *slow(*((family, 3) for family in mtp_checkpoints.CHAINED if family != "deepseek-v3")),
    ],
)
def test_mtp_is_lossless(family: str, layers: int, tmp_path: Path) -> None:
    check_lossless(mtp_checkpoints.save(family, tmp_path, layers), dict(method="mtp"))


def check_lossless(model: str, config: dict[str, Any]) -> None:
    requests = mixed_requests(24)
    with engine(model) as llm:
        expected = run_together(llm, requests)
    config |= dict(num_speculative_tokens=3, rejection_sample_method="strict", draft_sample_method="coupled")
    options = SMALL_KV | dict(kv_cache_memory_bytes=3 << 20)  # some have six layers
    with speculating(model, config, max_num_batched_tokens=64, **options) as llm:
        check_same(requests, run_together(llm, requests), expected)
        assert accepted(llm) > 0


def test_layers_that_vllm_would_not_run_are_refused(tmp_path: Path) -> None:
    model = mtp_checkpoints.save("qwen3-next", tmp_path, layers=2)
    message = refusal(model, speculative_config=dict(method="mtp", num_speculative_tokens=2))
    assert "has 2 MTP layers, but vLLM's Qwen3NextMTP runs only the first" in message


def test_target_with_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    """MiMo-V2's keys and values have different sizes, for which vLLM sets a kernel; some layers have sinks."""
    recipe = ARCHITECTURES["mimo-v2-flash"]
    mtp_checkpoints.save_model(build(recipe), tmp_path)
    published: dict[str, Any] = dict(
        add_full_attention_sink_bias=False,
        add_swa_attention_sink_bias=True,
        attention_bias=False,
        attention_value_scale=0.707,
        hybrid_layer_pattern=[1, 0],
        layernorm_epsilon=1e-5,
        moe_layer_freq=[0, 1],
        sliding_window_size=16,
        swa_head_dim=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_rope_theta=10000,
        swa_v_head_dim=16,
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | published))
    options = dict(load_format="dummy", speculative_config=dict(method="mtp", num_speculative_tokens=1))
    assert "has its own attention kernel" in refusal(str(tmp_path), **options)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("target", ["gemma4-dense", "gemma4-shared-kv"])
def test_gemma4_assistant_is_lossless(target: str, ordered: bool, tmp_path: Path) -> None:
    """The assistant scores all tokens or, with `ordered`, those of some clusters."""
    model, assistant = mtp_checkpoints.save_gemma4(target, tmp_path, ordered=ordered)
    check_lossless(model, dict(method="mtp", model=assistant))


@pytest.mark.slow
def test_gemma4_assistant_drafts_no_suppressed_token(tmp_path: Path) -> None:
    """All tokens but the last of the vocabulary are suppressed, of an assistant that would always be right."""
    model, assistant = mtp_checkpoints.save_gemma4("gemma4-dense", tmp_path, share=0.0)
    suppressed = json.dumps({"suppress_tokens": [*range(VOCAB - 1)]})
    (Path(assistant) / "generation_config.json").write_text(suppressed)
    with speculating(model, dict(method="mtp", model=assistant, num_speculative_tokens=2)) as llm:
        generate(llm, random_prompts(LENGTHS[1:3], VOCAB), GREEDY)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 0
        assert counter(llm, "vllm:spec_decode_num_accepted_tokens") == 0


class Chain:
    """GLM-4.5's MTP layers with the layers of transformers, which compute every position anew."""

    def __init__(self, folder: Path, layers: int, share: float) -> None:
        self.model = mtp_checkpoints.make_model("glm4-moe", layers, share)
        self.inner = self.model.model
        total = len(self.inner.layers)
        self.target, self.blocks = self.inner.layers[: total - layers], self.inner.layers[total - layers :]
        self.norm, self.eps = self.inner.norm, self.model.config.rms_norm_eps
        weights = load_file(folder / "model.safetensors")
        self.parts = [
            {name: weights[f"model.layers.{index}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
            | {"norm": weights[f"model.layers.{index}.shared_head.norm.weight"]}
            for index in range(total - layers, total)
        ]

    @torch.no_grad()
    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        embeddings, output = self.inner.embed_tokens.weight, self.model.lm_head.weight
        states = self.run(self.target, self.norm, embeddings[tokens[:-1]])
        found: list[int] = []
        for number, (block, parts) in enumerate(zip(self.blocks, self.parts, strict=True)):
            if number == num_drafts:
                break
            read = embeddings[[*tokens, *found][1 + number :]].clone()
            read[0] = 0.0  # vLLM's class hides the token at position 0
            together = torch.cat([self.normed(read, parts["enorm"]), self.normed(states, parts["hnorm"])], dim=1)
            states = self.run(nn.ModuleList([block]), nn.Identity(), together @ parts["eh_proj"].T)
            found.append(int((self.normed(states[-1], parts["norm"]) @ output.T).argmax()))
        return found

    def run(self, layers: nn.ModuleList, norm: nn.Module, embeddings: torch.Tensor) -> torch.Tensor:
        self.inner.layers, self.inner.norm = layers, norm
        self.inner.config.num_hidden_layers = len(layers)
        return self.inner(inputs_embeds=embeddings[None], use_cache=False).last_hidden_state[0]

    def normed(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(states, weight.shape, weight, self.eps)

    def accepted(self, prompt: list[int], text: list[int], k: int) -> Iterator[tuple[int, int]]:
        """Yield how many tokens each step drafts and accepts."""
        done = 1
        while done < len(text):
            tokens = [*prompt, *text[:done]]
            num_drafts = min(k, len(text) - done - 1, len(tokens))
            drafts = self.drafts(tokens, num_drafts)
            right = next((at for at, draft in enumerate(drafts) if draft != text[done + at]), num_drafts)
            if num_drafts:
                yield num_drafts, right
            done += right + 1


def test_chained_layers_draft_what_transformers_does(tmp_path: Path) -> None:
    """Each step accepts as many drafts as layers do that read every position anew, with the tokens that are known."""
    layers = k = 3
    model, prompts = mtp_checkpoints.save("glm4-moe", tmp_path, layers), random_prompts(LENGTHS, VOCAB)
    with speculating(model, dict(method="mtp", num_speculative_tokens=k), **CHUNKED) as llm:
        outputs = generate(llm, prompts, GREEDY)
    chain, total = Chain(tmp_path, layers, 0.3), 0
    for prompt, text, (drafted, right) in zip(prompts, first_tokens(outputs), accounts(outputs), strict=True):
        assert list(zip(drafted, right, strict=True)) == list(chain.accepted(prompt, text, k)), f"of {len(prompt)}"
        total += sum(right)
    assert 0.3 * sum(sum(drafted) for drafted, _ in accounts(outputs)) < total
