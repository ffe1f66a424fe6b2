"""Mistakes in our own options stop the start-up with the option's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_spec import backends
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


def test_unknown_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGS_DEVICE", "tpu")
    with pytest.raises(UnsupportedConfigError, match="VGS_DEVICE=tpu is not available; use one of cpu"):
        backends.choose_device()


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
