"""Pooling models and encoders: embeddings and classes are transformers', however prompts come."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    BertModel,
    ModernBertModel,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.v1.pool.late_interaction import build_late_interaction_doc_params, build_late_interaction_query_params

from tests.full_tests.engines import counter, engine
from tests.full_tests.prompts import PROMPTS, random_prompts
from tests.full_tests.tiny_models import VOCAB

TOLERANCE = 1e-4
TEXTS = random_prompts((25, 73, 11, 1, 64, 65, 33, 90, 2, 47), VOCAB, seed=3)
BATCHES: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=200)
# Prompts in several chunks, and too few blocks for all that may run.
BUSY: dict[str, Any] = BATCHES | dict(max_num_batched_tokens=48, block_size=32, num_gpu_blocks_override=7)

Made = Callable[[str], str]


@torch.no_grad()
def states(kind: Any, model: str) -> list[torch.Tensor]:
    """[T, H] of each prompt alone."""
    made = kind.from_pretrained(model, dtype=torch.float32).eval()
    return [made(input_ids=torch.tensor([text])).last_hidden_state[0] for text in TEXTS]


def asked() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": text} for text in TEXTS]


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)


def data(llm: LLM, task: str, params: Any = None) -> list[torch.Tensor]:
    outputs = llm.encode(asked(), pooling_params=params, pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_embeddings_in_chunks_and_from_the_prefix_cache(made: Made) -> None:
    model = made("qwen3-embedding")
    expected = [unit(states_TH[-1]) for states_TH in states(Qwen3Model, model)]
    with engine(model, **BUSY | dict(num_gpu_blocks_override=40)) as llm:
        for _ in range(2):
            check(data(llm, "embed"), expected)
        assert counter(llm, "vllm:prefix_cache_hits") > 0


@pytest.mark.slow
def test_token_embeddings_in_chunks(made: Made) -> None:
    """They are of whole prompts, so the prefix cache is not read for them."""
    model = made("qwen3-embedding")
    expected = [unit(states_TH) for states_TH in states(Qwen3Model, model)]
    with engine(model, pooler_config=PoolerConfig(task="token_embed"), **BUSY) as llm:
        for _ in range(2):
            check(data(llm, "token_embed"), expected)


@pytest.mark.slow
def test_pooling_parameters_differ_within_a_batch(made: Made) -> None:
    with engine(made("qwen3-embedding"), **BUSY) as llm:
        both = [PoolingParams(use_activation=index % 2 == 0) for index in range(len(TEXTS))]
        lengths = [float(vector.norm()) for vector in data(llm, "embed", both)]
    assert all(abs(length - 1) < TOLERANCE for length in lengths[::2]), lengths
    assert all(abs(length - 1) > TOLERANCE for length in lengths[1::2]), lengths


@pytest.mark.slow
@torch.no_grad()
def test_reranker_scores_equal_transformers(made: Made) -> None:
    """As Qwen3-Reranker: a generating model, asked for its next token of two."""
    no, yes = "n", "y"
    model = made("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(model)
    query, *texts = [text for text in PROMPTS if len(text) < 60]
    generating = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = []
    for text in texts:
        logits_V = generating(**tokenizer(query + text, return_tensors="pt")).logits[0, -1]
        ids = tokenizer.convert_tokens_to_ids([no, yes])
        expected.append(logits_V[ids].softmax(-1)[1])
    published = dict(architectures=["Qwen3ForSequenceClassification"], is_original_qwen3_reranker=True)
    overrides = published | dict(classifier_from_token=[no, yes])
    with engine(model, runner="pooling", hf_overrides=overrides, **BUSY | dict(num_gpu_blocks_override=40)) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.score(query, texts, use_tqdm=False)
            found = torch.tensor([output.outputs.score for output in outputs])
            torch.testing.assert_close(found, torch.stack(expected), atol=TOLERANCE, rtol=0)
        assert counter(llm, "vllm:prefix_cache_hits") > 0
    assert found.std() > 100 * TOLERANCE


def test_prompts_of_a_batch_see_only_themselves(made: Made) -> None:
    model = made("bert")
    expected = [unit(states_TH[0]) for states_TH in states(BertModel, model)]
    with engine(model, **BATCHES) as llm:
        check(data(llm, "embed"), expected)


@pytest.mark.slow
def test_mean_pooling_under_a_window(made: Made) -> None:
    model = made("modernbert")
    found = states(ModernBertModel, model)
    with engine(model, pooler_config=PoolerConfig(seq_pooling_type="MEAN"), **BATCHES) as llm:
        check(data(llm, "embed"), [unit(states_TH.mean(0)) for states_TH in found])


@pytest.mark.slow
@torch.no_grad()
def test_token_types_of_text_pairs(made: Made) -> None:
    """Some requests of a batch have them, others none; the second text begins at another token in each."""
    model = made("bert-classify")
    classifying = BertForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    params, expected = [], []
    for number, prompt in enumerate(TEXTS):
        begin = len(prompt) // 2 if number % 3 else None
        extra = None if begin is None else {"compressed_token_type_ids": begin}
        params.append(PoolingParams(task="classify", extra_kwargs=extra))
        types = [int(begin is not None and at >= begin) for at in range(len(prompt))]
        logits = classifying(input_ids=torch.tensor([prompt]), token_type_ids=torch.tensor([types])).logits
        expected.append(logits[0].softmax(-1))
    with engine(model, **BATCHES) as llm:
        check(data(llm, "classify", params), expected)


@pytest.mark.slow
def test_late_interaction_scores(made: Made) -> None:
    """The first prompt with each of the others, as vLLM's score endpoint asks for it."""
    model = made("bert")
    query, *texts = map(unit, states(BertModel, model))
    expected = [(query @ text.T).amax(-1).sum() for text in texts]
    of_query = build_late_interaction_query_params("query", len(texts))
    of_texts = [build_late_interaction_doc_params("query") for _ in texts]
    options = dict(pooler_config=PoolerConfig(task="token_embed"), **BATCHES)
    with engine(model, **options) as llm:
        params = [PoolingParams(task="token_embed", late_interaction_params=one) for one in (of_query, *of_texts)]
        first, *others = asked()
        llm.encode([first], pooling_params=params[0], pooling_task="token_embed", use_tqdm=False)
        found = llm.encode(others, pooling_params=params[1:], pooling_task="token_embed", use_tqdm=False)
        check([one.outputs.data for one in found], expected)
