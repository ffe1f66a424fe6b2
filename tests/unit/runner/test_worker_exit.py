"""How a worker process exits."""

import gc
from typing import Any

import pytest

from vllm_gaudi_spec import worker as module
from vllm_gaudi_spec.worker import Worker


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(Worker, "shutdown", lambda self: names.append("shutdown"))
    for name in ("destroy_model_parallel", "destroy_distributed_environment"):
        monkeypatch.setattr(module, name, lambda name=name: names.append(name))
    monkeypatch.setattr(gc, "freeze", lambda: names.append("freeze"))
    return names


@pytest.mark.parametrize("is_child", [False, True])
def test_worker_shuts_down_before_the_device_software(
    is_child: bool, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python calls at exit is called in the reverse order: registered once the card's software is loaded. The
    collector's last walk is left out in a process of vLLM's alone."""
    registered: list[Any] = []

    def load_backend() -> None:
        registered.append("the card's software")

    monkeypatch.setattr(module, "load_backend", load_backend)
    monkeypatch.setattr(module.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(module.multiprocessing, "parent_process", lambda: object() if is_child else None)
    worker = Worker.__new__(Worker)
    with pytest.raises(AttributeError, match="parallel_config"):  # it has no configuration to go on with
        worker.init_device()
    software, (at_exit, *arguments) = registered
    assert software == "the card's software"
    ends = ["shutdown", "destroy_model_parallel", "destroy_distributed_environment"]
    at_exit(*arguments)
    freeze = ["freeze"] if is_child else []
    assert called == freeze, "vLLM has ended it, or it never began"
    called.clear()
    worker.model_runner = object()
    at_exit(*arguments)
    assert called == [*ends, *freeze]
    called.clear()
    del worker
    at_exit(*arguments)
    assert called == freeze
