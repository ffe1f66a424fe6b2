"""What the platform of a Gaudi refuses before a card is opened."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.hpu import platform as hpu


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of this platform without those of all platforms."""
    monkeypatch.setattr(hpu, "set_gaudi_defaults", lambda: None)
    monkeypatch.setattr(hpu.CapturingPlatform, "check_and_update_config", lambda config: None)


@pytest.mark.parametrize(("dtype", "refused"), [("float16", True), ("bfloat16", False), ("float32", False)])
def test_s17_float16_is_refused(dtype: str, refused: bool, alone: None) -> None:
    """It used to load and fail in the card's self-test with an error that named the card's software."""
    model = SimpleNamespace(model="MODEL", dtype=getattr(torch, dtype))
    config: Any = SimpleNamespace(model_config=model)
    if not refused:
        hpu.HpuSpecPlatform.check_and_update_config(config)
        return
    with pytest.raises(UnsupportedConfigError, match="MODEL is not served in float16 on a Gaudi; use --dtype bfloat16"):
        hpu.HpuSpecPlatform.check_and_update_config(config)
