"""Prompts of embeddings in place of tokens: answers are those of transformers, however prompts come, with drafts as
without."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.full_tests.engines import counter, engine, first_tokens, preemptions
from tests.full_tests.prompts import random_prompts
from tests.full_tests.server import Server
from tests.full_tests.speculation import ngram
from tests.full_tests.tiny_models import VOCAB

LENGTHS = (40, 73, 1, 2, 64, 65, 33, 90, 17, 100)
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Prompts in chunks, and too few blocks for all that may run.
BUSY: dict[str, Any] = dict(
    max_model_len=192, max_num_seqs=6, max_num_batched_tokens=48, block_size=32, num_gpu_blocks_override=13
)

Prompt = dict[str, Any]


class Embedded:
    """Prompts, half of them of embeddings, and what transformers answers."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        texts = random_prompts(LENGTHS, VOCAB, seed=5)
        self.prompts: list[Prompt] = [{"prompt_token_ids": text} for text in texts]
        generator = torch.Generator().manual_seed(1)
        for index in range(0, len(texts), 2):  # near its tokens', and of none
            rows_LH = self.rows(texts[index])
            self.prompts[index] = {"prompt_embeds": rows_LH + 0.05 * torch.randn(rows_LH.shape, generator=generator)}
        mixed = texts[7]  # of tokens, but for a part in the middle, where the token is none of the model
        are_tokens = [not 20 <= position < 60 for position in range(len(mixed))]
        self.prompts[7] = {
            "prompt_embeds": torch.where(torch.tensor(are_tokens)[:, None], 0.0, -self.rows(mixed)),
            "prompt_token_ids": [token if it else 10**6 for token, it in zip(mixed, are_tokens, strict=True)],
            "prompt_is_token_ids": are_tokens,
        }
        self.whole = [self.embeds_of(prompt) for prompt in self.prompts]
        self.answers = [self.answer(rows_LH) for rows_LH in self.whole]

    @torch.no_grad()
    def rows(self, tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = self.model.get_input_embeddings()(torch.tensor(tokens))
        return found

    def embeds_of(self, prompt: Prompt) -> torch.Tensor:
        if (rows_LH := prompt.get("prompt_embeds")) is None:
            return self.rows(prompt["prompt_token_ids"])
        if (are_tokens := prompt.get("prompt_is_token_ids")) is None:
            return rows_LH
        tokens = [token if it else 0 for token, it in zip(prompt["prompt_token_ids"], are_tokens, strict=True)]
        return torch.where(torch.tensor(are_tokens)[:, None], self.rows(tokens), rows_LH)

    @torch.no_grad()
    def answer(self, rows_LH: torch.Tensor) -> list[int]:
        found: list[int] = []
        for _ in range(NUM_TOKENS):  # no `generate`, which would never choose the end
            found.append(int(self.model(inputs_embeds=rows_LH[None]).logits[0, -1].argmax()))
            rows_LH = torch.cat((rows_LH, self.rows(found[-1:])))
        return found


@pytest.fixture(scope="module")
def embedded(tiny_llama: str) -> Embedded:
    return Embedded(tiny_llama)


@pytest.mark.parametrize(
    "drafts",
    ["ngram", pytest.param("none", marks=pytest.mark.slow), pytest.param("draft_model", marks=pytest.mark.slow)],
)
def test_answers_equal_transformers(drafts: str, embedded: Embedded, tiny_llama: str) -> None:
    """In chunks, with preemptions, from the prefix cache, beside prompts of text. The drafter sees no token of an
    embedding."""
    spec_config = {
        "none": None,
        "ngram": ngram(),
        "draft_model": dict(method="draft_model", model=tiny_llama, num_speculative_tokens=3),
    }[drafts]
    with engine(tiny_llama, enable_prompt_embeds=True, speculative_config=spec_config, **BUSY) as llm:
        for _ in range(2):
            outputs = llm.generate(embedded.prompts, GREEDY, use_tqdm=False)
            assert first_tokens(outputs) == embedded.answers
        assert preemptions(llm) > 0
        # All but the last token: a prompt ends with a decode of an embedding.
        hits = counter(llm, "vllm:prefix_cache_hits")
        for _ in range(2):
            (output,) = llm.generate(embedded.prompts[4], GREEDY, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == embedded.answers[4]
        assert counter(llm, "vllm:prefix_cache_hits") > hits
        # The same tokens, of other embeddings.
        (output,) = llm.generate({"prompt_embeds": -embedded.whole[4]}, GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == embedded.answer(-embedded.whole[4])
        if drafts == "draft_model":
            assert counter(llm, "vllm:spec_decode_num_accepted_tokens") > 0
        for prompt, words in _hostile(embedded.whole[0]):
            with pytest.raises(VLLMValidationError, match=words):
                llm.generate(prompt, GREEDY, use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="no prompt_logprobs"):
            llm.generate(embedded.prompts[0], SamplingParams(prompt_logprobs=1), use_tqdm=False)


def _hostile(rows_LH: torch.Tensor) -> Iterator[tuple[Prompt, str]]:
    """Prompts for `LLM`, and words of the answers."""
    broken = rows_LH.clone()
    broken[3, 5] = torch.nan
    yield {"prompt_embeds": rows_LH[:, :-1]}, "wide"
    yield {"prompt_embeds": rows_LH.long()}, "int64"
    yield {"prompt_embeds": broken}, "not finite"
    yield {"prompt_embeds": rows_LH * 1e30}, "1e\\+15"
    tokens = list(range(len(rows_LH)))
    yield {"prompt_embeds": rows_LH, "prompt_token_ids": tokens[1:]}, "length"
    yield {"prompt_embeds": rows_LH, "prompt_is_token_ids": [True] * len(tokens)}, "without prompt_token_ids"
    yield {"prompt_embeds": rows_LH, "prompt_token_ids": [10**6, *tokens[1:]]}, "vocabulary"


# ---- over HTTP -------------------------------------------------------------------------------------------


def encoded(value: Any) -> str:
    written = io.BytesIO()
    torch.save(value, written)
    return base64.b64encode(written.getvalue()).decode()


@pytest.fixture(scope="module")
def asked(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    log = tmp_path_factory.mktemp("embeds") / "log"
    with Server(tiny_llama, log, "--enable-prompt-embeds", "--max-model-len", "256", *drafts) as server:
        yield server


def body(prompt_embeds: Any, **more: Any) -> dict[str, Any]:
    return dict(prompt_embeds=prompt_embeds, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True) | more


@pytest.mark.slow
def test_completions_of_embeddings(asked: Server, embedded: Embedded) -> None:
    """Half precision is the client's affair; embeddings come before texts, as upstream has it."""
    rows = [embedded.whole[0], embedded.whole[4].double(), embedded.whole[6]]
    text = embedded.prompts[1]["prompt_token_ids"]
    found = asked.complete(**body([encoded(one) for one in rows], prompt=[text], return_token_ids=True))
    answers = [choice["token_ids"] for choice in sorted(found["choices"], key=lambda choice: choice["index"])]
    assert answers == [embedded.answers[index] for index in (0, 4, 6, 1)]


@pytest.mark.slow
def test_chat_with_embeddings(asked: Server, embedded: Embedded) -> None:
    """The rows of the tokens of a text: the chat is the same as with the text."""
    asked_for = dict(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True)
    words = "The quick brown fox jumps over the lazy dog"
    of_text = asked.post("/v1/chat/completions", asked_for | dict(messages=[dict(role="user", content=words)]))
    tokens = asked.post("/tokenize", dict(prompt=words, add_special_tokens=False))["tokens"]
    part = dict(type="prompt_embeds", data=encoded(embedded.rows(tokens)))
    of_embeds = asked.post("/v1/chat/completions", asked_for | dict(messages=[dict(role="user", content=[part])]))
    assert of_embeds["usage"] == of_text["usage"]
    assert of_embeds["choices"][0]["token_ids"] == of_text["choices"][0]["token_ids"]
