"""How a worker process starts."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from vllm.config import set_current_vllm_config

from tests.unit.test_config import engine_config, start_method_stays  # noqa: F401
from vllm_gaudi_spec import worker as module
from vllm_gaudi_spec.worker import Worker


class StartedError(Exception):
    pass


@pytest.mark.parametrize("seconds", [7, None])
def test_world_group_gets_the_configured_timeout(
    seconds: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[timedelta | None] = []

    def start(*arguments: Any, timeout: timedelta | None = None) -> None:
        timeouts.append(arguments[5] if len(arguments) > 5 else timeout)
        raise StartedError

    monkeypatch.setattr(module, "init_distributed_environment", start)
    config = engine_config(tmp_path, None, distributed_timeout_seconds=seconds)
    with set_current_vllm_config(config), pytest.raises(StartedError):
        Worker(config, local_rank=0, rank=0, distributed_init_method="tcp://127.0.0.1:1").init_device()
    assert timeouts == [None if seconds is None else timedelta(seconds=seconds)]
