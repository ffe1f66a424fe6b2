"""Pooling models: embeddings and classes are transformers', however prompts come."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM, Qwen3Model
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig

from tests.full_tests.engines import counter, engine
from tests.full_tests.prompts import PROMPTS, random_prompts
from tests.full_tests.tiny_models import VOCAB
from tests.models import checkpoints
from tests.models.run import CASES

pytestmark = pytest.mark.slow

LENGTHS = (25, 73, 11, 1, 64, 65, 33, 90, 2, 47)
TOLERANCE = 1e-4
# Prompts in several chunks, and too few blocks for all that may run.
BUSY: dict[str, Any] = dict(
    max_model_len=128, max_num_seqs=4, max_num_batched_tokens=48, block_size=32, num_gpu_blocks_override=7
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


def checkpoint(case: str, folder: Path) -> str:
    return str(checkpoints.make(case, CASES[case], folder))


def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, VOCAB, seed=3)


@torch.no_grad()
def states(model: str) -> list[torch.Tensor]:
    """[T, H] of each prompt, each row of length 1."""
    made = Qwen3Model.from_pretrained(model, dtype=torch.float32).eval()
    found = [made(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts()]
    return [torch.nn.functional.normalize(states_TH, dim=-1) for states_TH in found]


def asked() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts()]


def check_embeddings(llm: LLM, expected: list[torch.Tensor]) -> None:
    outputs = llm.embed(asked(), use_tqdm=False)
    for output, states_TH in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), states_TH[-1], atol=TOLERANCE, rtol=0)


def test_embeddings_in_chunks_and_from_the_prefix_cache(folder: Path) -> None:
    model = checkpoint("qwen3-embedding", folder)
    expected = states(model)
    with engine(model, **BUSY | dict(num_gpu_blocks_override=40)) as llm:
        check_embeddings(llm, expected)
        check_embeddings(llm, expected)
        assert counter(llm, "vllm:prefix_cache_hits") > 0


def test_token_embeddings_in_chunks(folder: Path) -> None:
    """They are of whole prompts, so the prefix cache is not read for them."""
    model = checkpoint("qwen3-embedding", folder)
    expected = states(model)
    with engine(model, pooler_config=PoolerConfig(task="token_embed"), **BUSY) as llm:
        for _ in range(2):
            outputs = llm.encode(asked(), pooling_task="token_embed", use_tqdm=False)
            for output, states_TH in zip(outputs, expected, strict=True):
                torch.testing.assert_close(output.outputs.data, states_TH, atol=TOLERANCE, rtol=0)


def test_pooling_parameters_differ_within_a_batch(folder: Path) -> None:
    model = checkpoint("qwen3-embedding", folder)
    with engine(model, **BUSY) as llm:
        both = [PoolingParams(use_activation=index % 2 == 0) for index in range(len(LENGTHS))]
        outputs = llm.embed(asked(), pooling_params=both, use_tqdm=False)
        lengths = [float(torch.tensor(output.outputs.embedding).norm()) for output in outputs]
    assert all(abs(length - 1) < TOLERANCE for length in lengths[::2]), lengths
    assert all(abs(length - 1) > TOLERANCE for length in lengths[1::2]), lengths


def test_classes_equal_transformers(folder: Path) -> None:
    model = checkpoint("qwen3-classify", folder)
    reference = json.loads((Path(model) / checkpoints.REFERENCE).read_text())["vectors"]
    with engine(model, **BUSY) as llm:
        outputs = llm.classify([{"prompt_token_ids": prompt} for prompt in checkpoints.prompts()], use_tqdm=False)
    for output, probs in zip(outputs, reference, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.probs), torch.tensor(probs), atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_reranker_scores_equal_transformers(folder: Path) -> None:
    """As Qwen3-Reranker: a generating model, asked for its next token of two."""
    no, yes = "n", "y"
    model = checkpoint("qwen3", folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    query, *texts = [text for text in PROMPTS if len(text) < 60]
    made = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = []
    for text in texts:
        logits_V = made(**tokenizer(query + text, return_tensors="pt")).logits[0, -1]
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
