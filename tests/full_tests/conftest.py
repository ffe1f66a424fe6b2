"""Checkpoints shared by the full tests of one session."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.full_tests import tiny_models
from tests.full_tests.server import Server


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
def server(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One `vllm serve` on the tiny Llama for all tests that talk to a server."""
    server = Server(tiny_llama, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        yield server
    finally:
        server.stop()
