"""Checkpoints shared by the full tests of one session."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.full_tests import adapters, tiny_models
from tests.full_tests.server import Server
from tests.full_tests.workload import Plain, Request, mixed_requests, without_drafts
from vllm_gaudi_spec.environment import cache_folder


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the module's own, in which its engines find nothing of others but the emulated CANN: ranks
    would compile it once more."""
    compiled = cache_folder() / "cann"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        cache_folder().mkdir(parents=True)
        if compiled.is_dir():
            (cache_folder() / "cann").symlink_to(compiled)
        yield


@pytest.fixture(scope="session")
def demo_model() -> str:
    """SmolLM2-135M-Instruct as a Hugging Face folder; the first call prepares it."""
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    return str(demo_model_path())


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of a checkpoint of `make verify-models`, made once per session."""
    from tests.models import checkpoints
    from tests.models.run import CASES

    folder = tmp_path_factory.mktemp("cases")
    return cache(lambda case: str(checkpoints.make(case, CASES[case], folder)))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tiny_models.llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def looping_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama whose text runs in circles."""
    return tiny_models.save(tiny_models.looping_llama, tmp_path_factory.mktemp("looping"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Return the requests of a module that defines none of its own."""
    return mixed_requests(48)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> Plain:
    """Return the answers to the module's requests without drafts."""
    return without_drafts(requests)


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
    return tiny_models.save_renumbered(looping_llama, tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def loras(looping_llama: str, lora_folder: Path) -> list[adapters.Adapter]:
    """LoRA adapters for the looping Llama."""
    return adapters.various(looping_llama, lora_folder)


@pytest.fixture(scope="module")
def merged_loras(looping_llama: str, lora_folder: Path) -> adapters.Merged:
    """What the looping Llama says with an adapter's weights put into its own."""
    return adapters.Merged(looping_llama, lora_folder)


@pytest.fixture(scope="session")
def server(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One `vllm serve` on the tiny Llama for all tests that talk to a server."""
    with Server(tiny_llama, tmp_path_factory.mktemp("server") / "log.txt") as server:
        yield server
