"""On an emulated Gaudi with little memory: warm-up says what graphs keep, and which option to lower where it ends."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests.engines import engine
from tests.full_tests.speculation import ngram
from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices import load_backend

pytestmark = pytest.mark.emulated

MIB = 1 << 20
SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=256, max_num_batched_tokens=128, kv_cache_memory_bytes=None)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_backend()  # puts the card in place
    return emulator.device()


def start(model: str, **options: Any) -> None:
    with engine(model, speculative_config=ngram(2), **SIZES | options):
        pass


def shrink(card: Any, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """To what is in use, and so much more."""
    held = card.in_use + card.graph_bytes
    monkeypatch.setattr(card, "model", replace(card.model, memory=held + num_bytes))


def test_l29_r08_memory_that_ends_in_warm_up(
    looping_llama: str, card: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    shrink(card, monkeypatch, 24 * MIB)
    with pytest.raises(UnsupportedConfigError) as raised:
        start(looping_llama, gpu_memory_utilization=1.0)
    text = str(raised.value)
    print(text)
    found = re.search(r"in warm-up at (\d+) of (\d+) runs, .*lower --gpu-memory-utilization 1 -> ([\d.]+)\.$", text)
    assert found, text
    # With what it says it starts.
    shrink(card, monkeypatch, 24 * MIB)
    start(looping_llama, gpu_memory_utilization=float(found[3]))
