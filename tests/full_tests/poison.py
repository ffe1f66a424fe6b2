"""Checkpoints with a token whose embedding is no number, and requests that bring it: what they leave behind must reach
nobody else."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.full_tests.engines import first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.tiny_models import VOCAB

TOKEN = 63
"""Nobody else's texts have it."""


def poison(folder: str | Path, value: float) -> None:
    """Change a checkpoint whose embeddings are not its output matrix."""
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" in weights
    (name,) = (name for name in weights if name.endswith("model.embed_tokens.weight"))
    weights[name][TOKEN] = value
    save_file({key: weight.clone() for key, weight in weights.items()}, file, metadata={"format": "pt"})


def fill(llm: LLM, **params: Any) -> None:
    """As many such requests as together have each KV block once. They share no prefix."""
    config = llm.llm_engine.vllm_config
    num_blocks, length = config.cache_config.num_gpu_blocks, config.model_config.max_model_len // 2
    assert num_blocks is not None
    number = num_blocks * config.cache_config.block_size // length + 2
    poisoned = [[2 + index % 60, *[TOKEN, 3] * (length // 2 - 2 - index // 60)] for index in range(number)]
    says = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, **params)
    assert all(len(tokens) == 6 for tokens in first_tokens(generate(llm, poisoned, says)))


SAYS = dict(logit_bias={TOKEN: 100.0})
REQUEST = (
    [*[4, TOKEN] * 12, 6],
    SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False, **SAYS),
)
"""Which has it in its prompt and in its answer."""


class Others:
    """Requests that have nothing to do with it, and what they were answered before."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        prompts = random_prompts([5, 37, 70, 100], VOCAB)
        self._prompts = [[token for token in prompt if token != TOKEN] for prompt in prompts]
        kinds = [dict(temperature=0), dict(temperature=0.8, seed=3)] * 2
        self._params = [
            SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, logit_bias={TOKEN: -100.0}, **kind)
            for kind in kinds
        ]
        self.before = self._ask()

    def _ask(self) -> list[list[tuple[int, float]]]:
        outputs = generate(self._llm, self._prompts, self._params)
        return [_scored(output) for output in outputs]

    def check(self) -> None:
        """Bit for bit, where steps are the same ones: neither what was cached nor a drafter's state changes them."""
        config, found = self._llm.llm_engine.vllm_config, self._ask()
        assert tokens_of(found) == tokens_of(self.before)
        may_differ = config.cache_config.enable_prefix_caching or config.speculative_config is not None
        for one, before in zip(found, self.before, strict=True):
            assert [score for _, score in one] == pytest.approx(
                [score for _, score in before], abs=1e-4 * may_differ, rel=0
            )

    def check_beside(self, prompt: list[int]) -> None:
        """In one batch with such a request, as rows before it and after it."""
        says = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **SAYS)
        prompts = [self._prompts[0], prompt, *self._prompts[2:], prompt]
        outputs = generate(self._llm, prompts, [self._params[0], says, *self._params[2:], says])
        assert tokens_of([_scored(outputs[index]) for index in (0, 2, 3)]) == tokens_of(
            [self.before[index] for index in (0, 2, 3)]
        )


def tokens_of(answers: list[list[tuple[int, float]]]) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in answers]


def _scored(output: Any) -> list[tuple[int, float]]:
    (completion,) = output.outputs
    places = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, place[token].logprob) for token, place in places]


def start_and_abort(llm: LLM) -> None:
    """In the middle of a prompt, and in the middle of an answer."""
    core = llm.llm_engine
    length = core.vllm_config.model_config.max_model_len - 8
    for name, steps in (("in its prompt", 1), ("in its answer", 6)):
        core.add_request(
            name, {"prompt_token_ids": [TOKEN] * length}, SamplingParams(temperature=0, max_tokens=8, **SAYS)
        )
        for _ in range(steps):
            core.step()
        core.abort_request([name])
        while core.has_unfinished_requests():
            core.step()


def check(llm: LLM) -> None:
    others = Others(llm)
    others.check()
    fill(llm)
    others.check()
    fill(llm, **SAYS)
    others.check()
    start_and_abort(llm)
    others.check()
    others.check_beside([4, 5, TOKEN, 6])
    others.check_beside([4, 5, 6, 7])
    others.check()
