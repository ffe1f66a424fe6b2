"""The endpoints of pooling models answer with the numbers of transformers."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, BertForSequenceClassification, Qwen3Model

from tests.full_tests.prompts import PROMPTS, random_prompts
from tests.full_tests.server import Server
from tests.full_tests.tiny_models import BOS, EOS, VOCAB
from tests.models import checkpoints
from tests.models.run import CASES

pytestmark = pytest.mark.slow

TOLERANCE = dict(atol=1e-4, rtol=0)
MAX_LEN = 128
SHORT = [text for text in PROMPTS if len(text) < 60]
MANY = random_prompts([1 + number * 7 % 90 for number in range(150)], VOCAB, seed=9)


class Asked:
    """A server of a checkpoint, and the same in transformers."""

    def __init__(self, folder: str, kind: Any, server: Server) -> None:
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.server = server

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text)["input_ids"]
        return found

    @torch.no_grad()
    def states(self, ids: list[int]) -> torch.Tensor:
        """[T, H], each row of length 1."""
        found: torch.Tensor = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return torch.nn.functional.normalize(found, dim=-1)

    @torch.no_grad()
    def logits(self, text: str | list[int]) -> torch.Tensor:
        ids = self.ids(text) if isinstance(text, str) else text
        found: torch.Tensor = self.model(input_ids=torch.tensor([ids])).logits[0]
        return found


def running(folder: str, kind: Any, log: Path) -> Iterator[Asked]:
    with Server(folder, log, "--max-model-len", str(MAX_LEN)) as server:
        yield Asked(folder, kind, server)


def serving(case: str, kind: Any) -> Callable[..., Iterator[Asked]]:
    @pytest.fixture(scope="module")
    def asked(made: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
        yield from running(made(case), kind, tmp_path_factory.mktemp(case) / "log")

    return asked


embedding = serving("qwen3-embedding", Qwen3Model)
classifying = serving("bert-classify", BertForSequenceClassification)


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A cross-encoder: a class, and a tokenizer that gives the second of two texts another type of tokens."""
    cache, recipe = tmp_path_factory.mktemp("cross-encoder"), CASES["bert-classify"]
    folder = checkpoints.make("bert-score", replace(recipe, config=recipe.config | dict(num_labels=1)), cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = [(name, tokenizer.convert_tokens_to_ids(name)) for name in (BOS, EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {EOS}", pair=f"{BOS} $A {EOS} $B:1 {EOS}:1", special_tokens=names
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    given = json.loads(path.read_text()) | dict(model_input_names=["input_ids", "token_type_ids"])
    path.write_text(json.dumps(given))
    yield from running(str(folder), BertForSequenceClassification, cache / "log")


def check(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float32), expected, **TOLERANCE)


# ---- embeddings ------------------------------------------------------------------------------------------


def embeddings(asked: Asked, given: Any, **more: Any) -> list[Any]:
    data = asked.server.post("/v1/embeddings", dict(input=given) | more)["data"]
    return [one["embedding"] for one in sorted(data, key=lambda one: one["index"])]


def test_embeddings_of_many_concurrent_requests(embedding: Asked) -> None:
    """In a request, and in requests of many clients at once."""
    expected = [embedding.states(ids)[-1] for ids in MANY]
    with ThreadPoolExecutor(8) as clients:
        parts = list(
            clients.map(lambda first: embeddings(embedding, MANY[first : first + 25]), range(0, len(MANY), 25))
        )
    for found, state in zip([one for part in parts for one in part], expected, strict=True):
        check(found, state)
    for found, state in zip(embeddings(embedding, MANY), expected, strict=True):
        check(found, state)


def test_scores_of_embeddings(embedding: Asked) -> None:
    """The cosine of the angle between them."""
    query, *texts = SHORT
    states = [embedding.states(embedding.ids(text))[-1] for text in texts]
    expected = torch.stack([embedding.states(embedding.ids(query))[-1] @ state for state in states])
    found = embedding.server.post("/score", dict(text_1=query, text_2=texts))["data"]
    check([one["score"] for one in found], expected)
    ranked = embedding.server.post("/rerank", dict(query=query, documents=texts, top_n=3))["results"]
    check([one["relevance_score"] for one in ranked], expected.sort(descending=True).values[:3])
    assert [one["document"]["text"] for one in ranked] == [
        texts[index] for index in expected.argsort(descending=True)[:3]
    ]


# ---- classes ---------------------------------------------------------------------------------------------


def test_classes_of_many_texts(classifying: Asked) -> None:
    for found, ids in zip(classifying.server.post("/classify", dict(input=MANY))["data"], MANY, strict=True):
        probs = classifying.logits(ids).softmax(-1)
        check(found["probs"], probs)
        assert found["label"] == classifying.model.config.id2label[int(probs.argmax())]
        assert found["num_classes"] == len(probs)


# ---- scores of a model that reads both texts -------------------------------------------------------------


@torch.no_grad()
def score(asked: Asked, query: str, text: str, **tokenized: Any) -> torch.Tensor:
    given = asked.tokenizer(query, text, return_tensors="pt", **tokenized)
    assert given["token_type_ids"].unique().tolist() == [0, 1]
    found: torch.Tensor = asked.model(**given).logits[0, 0].sigmoid()
    return found


def test_scores_of_pairs(scoring: Asked) -> None:
    query, *texts = SHORT
    expected = torch.stack([score(scoring, query, text) for text in texts])
    assert len(expected.unique()) == len(texts)
    found = scoring.server.post("/score", dict(text_1=query, text_2=texts))["data"]
    check([one["score"] for one in found], expected)
    ranked = scoring.server.post("/rerank", dict(query=query, documents=texts, top_n=3))["results"]
    check([one["relevance_score"] for one in ranked], expected.sort(descending=True).values[:3])
