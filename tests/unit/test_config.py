"""Mistakes in our own options stop the start-up with the option's name."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_spec import backends, config
from vllm_gaudi_spec.config import Options, UnsupportedConfigError


def vllm_config(options: dict[str, Any] | None) -> Any:
    return SimpleNamespace(additional_config=options)


def test_defaults_and_lists() -> None:
    assert Options.from_vllm(vllm_config(None)) == Options()
    given = Options.from_vllm(vllm_config({"gaudi_spec": {"batch_buckets": [8, 1, 8], "warmup_tokens": -1}}))
    assert given == Options(batch_buckets=(1, 8), warmup_tokens=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_bucket": [1]}, "unknown option.*batch_bucket.*known are batch_buckets"),
        ({"batch_buckets": 4}, "batch_buckets must be a list of positive integers, got 4"),
        ({"prefill_buckets": [0]}, "prefill_buckets must be a list of positive integers"),
        ({"warmup_tokens": "all"}, "warmup_tokens must be an integer"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        Options.from_vllm(vllm_config({"gaudi_spec": options}))


def test_unknown_device_is_refused_by_vllm_itself() -> None:
    """vLLM swallows what a platform plugin raises and would go on with upstream's platform."""
    code = "from vllm.platforms import current_platform; current_platform.pre_register_and_update()"
    environment = os.environ | {"VGS_DEVICE": "tpu"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "VGS_DEVICE=tpu is not available; use one of cpu." in result.stderr.strip().splitlines()[-1]


def test_each_engine_of_a_process_asks_anew_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.delenv("VGS_START_METHOD_CHOSEN_BY", raising=False)
    for answer in ("fork", "spawn"):
        config.choose_start_method(lambda answer=answer: answer)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == answer
    monkeypatch.setenv("VGS_START_METHOD_CHOSEN_BY", "0")  # as in an engine process
    config.choose_start_method(lambda: "fork")
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_stays_inactive_beside_another_platform_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        name, value = "gaudi", "vllm_gaudi:register"

    monkeypatch.delenv("VGS_DEVICE", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(backends, "entry_points", lambda group: [Plugin])
    backends.other_platform_plugins.cache_clear()
    try:
        assert backends.choose_device() is None
        monkeypatch.setenv("VGS_DEVICE", "cpu")
        assert backends.choose_device() == "cpu"
        monkeypatch.delenv("VGS_DEVICE")
        monkeypatch.setenv("VLLM_PLUGINS", "gaudi_spec")
        backends.other_platform_plugins.cache_clear()
        assert backends.choose_device() == "cpu"
    finally:
        backends.other_platform_plugins.cache_clear()
