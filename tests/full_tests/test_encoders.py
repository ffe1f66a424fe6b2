"""Encoders: prompts of a batch see themselves alone, in both directions, and the numbers are transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, BertModel, ModernBertModel
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.v1.pool.late_interaction import build_late_interaction_doc_params, build_late_interaction_query_params

from tests.full_tests.engines import engine
from tests.full_tests.prompts import random_prompts
from tests.full_tests.tiny_models import VOCAB
from tests.models import checkpoints
from tests.models.run import CASES

LENGTHS = (25, 73, 11, 1, 64, 65, 33, 90, 2, 47)
TOLERANCE = 1e-4
PROMPTS = random_prompts(LENGTHS, VOCAB, seed=3)
BATCHES: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=200)


def checkpoint(case: str, folder: Path) -> str:
    return str(checkpoints.make(case, CASES[case], folder))


@torch.no_grad()
def states(made: Any) -> list[torch.Tensor]:
    """[T, H] of each prompt alone."""
    return [made.eval()(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def asked() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in PROMPTS]


def data(llm: LLM, task: str, params: Any = None) -> list[torch.Tensor]:
    outputs = llm.encode(asked(), pooling_params=params, pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)


def test_prompts_of_a_batch_see_only_themselves(tmp_path: Path) -> None:
    model = checkpoint("bert", tmp_path)
    expected = [unit(states_TH[0]) for states_TH in states(BertModel.from_pretrained(model, dtype=torch.float32))]
    with engine(model, **BATCHES) as llm:
        check(data(llm, "embed"), expected)


@pytest.mark.slow
def test_mean_pooling_under_a_window(tmp_path: Path) -> None:
    model = checkpoint("modernbert", tmp_path)
    found = states(ModernBertModel.from_pretrained(model, dtype=torch.float32))
    with engine(model, pooler_config=PoolerConfig(seq_pooling_type="MEAN"), **BATCHES) as llm:
        check(data(llm, "embed"), [unit(states_TH.mean(0)) for states_TH in found])


@pytest.mark.slow
@torch.no_grad()
def test_token_types_of_text_pairs(tmp_path: Path) -> None:
    """Some requests of a batch have them, others none; the second text begins at another token in each."""
    model = checkpoint("bert-classify", tmp_path)
    made = BertForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    params, expected = [], []
    for number, prompt in enumerate(PROMPTS):
        begin = len(prompt) // 2 if number % 3 else None
        extra = None if begin is None else {"compressed_token_type_ids": begin}
        params.append(PoolingParams(task="classify", extra_kwargs=extra))
        types = [int(begin is not None and at >= begin) for at in range(len(prompt))]
        logits = made(input_ids=torch.tensor([prompt]), token_type_ids=torch.tensor([types])).logits
        expected.append(logits[0].softmax(-1))
    with engine(model, **BATCHES) as llm:
        check(data(llm, "classify", params), expected)


@pytest.mark.slow
def test_late_interaction_scores(tmp_path: Path) -> None:
    """The first prompt with each of the others, as vLLM's score endpoint asks for it."""
    model = checkpoint("bert", tmp_path)
    query, *texts = map(unit, states(BertModel.from_pretrained(model, dtype=torch.float32)))
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
