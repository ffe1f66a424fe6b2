"""Heads that do not fit are refused at start-up, with what to change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests.heads import head, target
from tests.full_tests.test_refusals import refusal


def test_head_of_another_model_is_refused(tiny_llama: str) -> None:
    message = refusal(tiny_llama, speculative_config=head("eagle", 3))
    assert "hidden states of size 96" in message
    assert "give a head that was trained for this model" in message


@pytest.mark.parametrize(
    ("method", "own_config"),
    [pytest.param("medusa", {}, marks=pytest.mark.slow), ("eagle3", {"target_hidden_size": 64})],
    ids=["medusa", "eagle3"],
)
def test_head_for_another_size_is_refused(
    method: str, own_config: dict[str, Any], tmp_path: Path, tiny_llama: str
) -> None:
    """As its configuration says: an EAGLE-3 head's own size may differ from that of what it reads."""
    if own_config:
        shutil.copytree(head(method, 3)["model"], tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | own_config))
        message = refusal(target(method), speculative_config=head(method, 3) | dict(model=str(tmp_path)))
        assert "hidden states of size 64" in message
    else:
        message = refusal(tiny_llama, speculative_config=head(method, 3))
    assert "give a head that was trained for this model" in message


def test_target_without_auxiliary_states_is_refused() -> None:
    message = refusal(target("mtp"), speculative_config=head("eagle3", 3))
    assert "MiMoForCausalLM does not return the hidden states of its layers" in message
    assert "use another method" in message


def test_more_drafts_than_medusa_heads_are_refused() -> None:
    message = refusal(target("medusa"), speculative_config=head("medusa", 5))
    assert "4" in message
    assert "num_speculative_tokens" in message


def test_mtp_without_an_mtp_layer_is_refused() -> None:
    message = refusal(target("eagle"), speculative_config=dict(method="mtp", num_speculative_tokens=2))
    assert "mtp" in message.lower()
