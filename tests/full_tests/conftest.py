"""Checkpoints shared by the full tests of one session."""

import json
import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tests.full_tests import tiny_models
from tests.full_tests.engines import engine
from tests.full_tests.server import Server
from tests.full_tests.workload import Answer, Request, mixed_requests, run_together


@pytest.fixture(scope="session")
def demo_model() -> str:
    """SmolLM2-135M-Instruct as a Hugging Face folder; the first call prepares it."""
    from vllm_gaudi_spec.demo_model import demo_model_path

    return str(demo_model_path())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of a family's tiny checkpoint, written once per session."""

    @cache
    def path(family: str) -> str:
        return tiny_models.save(tiny_models.FAMILIES[family], tmp_path_factory.mktemp(family))

    return path


@pytest.fixture(scope="session")
def tiny_llama(tiny: Callable[[str], str]) -> str:
    return tiny("llama")


@pytest.fixture(scope="session")
def looping_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama whose text runs in circles."""
    return tiny_models.save(tiny_models.looping_llama, tmp_path_factory.mktemp("looping"))


@pytest.fixture(scope="session")
def mixed() -> list[Request]:
    return mixed_requests()


@pytest.fixture(scope="session")
def mixed_answers(looping_llama: str, mixed: list[Request]) -> list[list[Answer]]:
    """What the looping Llama says to them without speculation."""
    with engine(looping_llama) as llm:
        return run_together(llm, mixed)


@pytest.fixture(scope="session")
def cousin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter for the looping Llama, of the same vocabulary: often wrong."""
    return tiny_models.save(tiny_models.looping_llama, tmp_path_factory.mktemp("cousin"), seed=7)


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter with a vocabulary of its own: nearly always wrong."""
    size = 300

    def build() -> PreTrainedModel:
        return tiny_models.llama(vocab_size=size)

    return tiny_models.save(build, tmp_path_factory.mktemp("stranger"), vocab_size=size, seed=3)


@pytest.fixture(scope="session")
def twin(looping_llama: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The looping Llama with all its tokens renumbered: a drafter of another vocabulary that is always right."""
    folder = tmp_path_factory.mktemp("twin")
    new_ids = random.Random(0).sample(range(tiny_models.VOCAB), tiny_models.VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(looping_llama)
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    written["model"]["vocab"] = {token: new_ids[old] for token, old in written["model"]["vocab"].items()}
    for token in written["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    names = dict(bos_token=tiny_models.BOS, eos_token=tiny_models.EOS, chat_template=tokenizer.chat_template)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)), **names).save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(looping_llama)
    for weight in (model.model.embed_tokens.weight.data, model.lm_head.weight.data):
        weight[new_ids] = weight.clone()
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, role, new_ids[getattr(model.config, role)])
        setattr(model.generation_config, role, getattr(model.config, role))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def server(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One `vllm serve` on the tiny Llama for all tests that talk to a server."""
    server = Server(tiny_llama, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        yield server
    finally:
        server.stop()
