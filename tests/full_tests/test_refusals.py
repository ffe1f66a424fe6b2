"""Unsupported options are rejected at start-up, in a line that says what to do, and unsupported requests one by one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
)
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMValidationError

from tests.full_tests.engines import engine, generate
from tests.full_tests.heads import head, target
from tests.full_tests.tiny_models import common


def refusal(model: str, **options: Any) -> str:
    # Ours, or vLLM's own, which has another for methods that a model has no layers for.
    with (
        pytest.raises((ValueError, NotImplementedError)) as refused,
        engine(model, skip_tokenizer_init=True, **options),
    ):
        pass
    # An engine that got as far as its model left groups behind in this process.
    cleanup_dist_env_and_memory()
    message = str(refused.value)
    assert len(message.splitlines()) == 1, f"more than a line: {message}"
    return message


# Architecture, its configuration, and words of the refusal. No weights: it comes before they are looked for.
MODELS = [
    ("Step1ForCausalLM", lambda: LlamaConfig(**common()), "ALiBi"),
    ("PanguProMoEV2ForCausalLM", lambda: LlamaConfig(**common()), "attention sinks with keys"),
    ("GptOssForCausalLM", lambda: GptOssConfig(**common(num_local_experts=4), swiglu_limit=5.0), "swiglu_limit 5.0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "config", "words"), MODELS, ids=[model[0] for model in MODELS])
def test_a24_v01_v05_unsupported_models_are_refused(architecture: str, config: Any, words: str, tmp_path: Path) -> None:
    made = config()
    made.architectures = [architecture]
    made.save_pretrained(tmp_path)
    assert words in refusal(str(tmp_path), load_format="dummy")


@pytest.mark.slow
def test_prompts_of_models_without_kv_must_fit_into_a_step(tmp_path: Path) -> None:
    """vLLM would wait for ever to schedule a longer one."""
    made = Mamba2Config(
        hidden_size=64, num_hidden_layers=2, vocab_size=400, num_heads=4, head_dim=32, state_size=8, n_groups=1
    )
    made.architectures = ["Mamba2ForCausalLM"]
    made.save_pretrained(tmp_path)
    words = refusal(str(tmp_path), load_format="dummy", max_num_batched_tokens=64)
    assert "set --max-num-batched-tokens to 512 or more" in words


def test_bad_request_does_not_stop_the_engine(tiny_llama: str) -> None:
    good = SamplingParams(max_tokens=2, ignore_eos=True)
    with engine(tiny_llama) as llm:
        for bad in (
            SamplingParams(logit_bias={100_000: 1.0}),
            SamplingParams(prompt_logprob_token_ids=[[5]]),
            SamplingParams(extra_args={"num_speculative_tokens": -1}),
        ):
            with pytest.raises(
                VLLMValidationError, match=r"logit_bias|prompt_logprob_token_ids|num_speculative_tokens"
            ):
                generate(llm, [[5, 6, 7]], bad)
        assert len(generate(llm, [[5, 6, 7]], good)[0].outputs[0].token_ids) == 2


def test_head_of_another_model_is_refused(tiny_llama: str) -> None:
    message = refusal(tiny_llama, speculative_config=head("eagle", 3))
    assert "hidden states of size 96" in message
    assert "use a head that was trained for this model" in message


@pytest.mark.parametrize(
    ("method", "own_config"),
    [pytest.param("medusa", {}, marks=pytest.mark.slow), ("eagle3", {"target_hidden_size": 64})],
    ids=["medusa", "eagle3"],
)
def test_head_for_another_size_is_refused(
    method: str, own_config: dict[str, Any], tmp_path: Path, tiny_llama: str
) -> None:
    """The configuration decides, since an EAGLE-3 head's own size may differ from the size of the states it reads."""
    if own_config:
        shutil.copytree(head(method, 3)["model"], tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | own_config))
        message = refusal(target(method), speculative_config=head(method, 3) | dict(model=str(tmp_path)))
        assert "hidden states of size 64" in message
    else:
        message = refusal(tiny_llama, speculative_config=head(method, 3))
    assert "use a head that was trained for this model" in message


def test_target_without_auxiliary_states_is_refused() -> None:
    message = refusal(target("mtp"), speculative_config=head("eagle3", 3))
    assert "MiMoForCausalLM does not return the hidden states of" in message
    assert "set a drafter made for this target, or another method, in --speculative-config" in message


def test_more_drafts_than_medusa_heads_are_refused() -> None:
    message = refusal(target("medusa"), speculative_config=head("medusa", 5))
    assert "4" in message
    assert "num_speculative_tokens" in message


def test_mtp_without_an_mtp_layer_is_refused() -> None:
    message = refusal(target("eagle"), speculative_config=dict(method="mtp", num_speculative_tokens=2))
    assert "mtp" in message.lower()
