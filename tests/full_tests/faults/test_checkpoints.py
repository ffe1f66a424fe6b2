"""A damaged draft checkpoint ends the start with one line that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.full_tests.engines import engine
from tests.full_tests.test_startup import failed_start

WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.slow


def truncated(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def without_a_part(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": dict.fromkeys(weights, "model-00001-of-00002.safetensors")
        | {"x": "model-00002-of-00002.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def half_a_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text()[:40])


def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def narrower(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[..., :-8].contiguous() for name, tensor in weights.items()}


def fewer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if "layers.1." not in name}


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncated, "is damaged or was only half written"),
    "empty": (empty, "is damaged or was only half written"),
    "without a part": (without_a_part, "model-00002-of-00002.safetensors, which is missing"),
    "without weights": (without_weights, "cannot be loaded"),
    "other shapes": (changed(narrower), "cannot be loaded"),
    "a layer missing": (changed(fewer), "cannot be loaded"),
    "without a configuration": (without_config, "config"),
    "half a configuration": (half_a_config, "config"),
}


def damaged(case: str, source: str, folder: Path) -> tuple[str, str]:
    """Folder and what is to be said."""
    shutil.copytree(source, folder)
    damage, said = CASES[case]
    damage(folder)
    return str(folder), said


def draft_model(folder: str) -> dict[str, Any]:
    return dict(method="draft_model", model=folder, num_speculative_tokens=3)


@pytest.mark.parametrize("case", CASES)
def test_damaged_drafter_is_refused(case: str, looping_llama: str, cousin: str, tmp_path: Path) -> None:
    folder, said = damaged(case, cousin, tmp_path / "drafter")
    with pytest.raises((ValueError, OSError)) as raised, engine(looping_llama, speculative_config=draft_model(folder)):
        pytest.fail("it started")
    assert folder in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.parametrize("case", ["truncated", "other shapes", "without a configuration"])
def test_server_ends_with_a_damaged_drafter(case: str, looping_llama: str, cousin: str, tmp_path: Path) -> None:
    folder, said = damaged(case, cousin, tmp_path / "drafter")
    log = failed_start(looping_llama, "--speculative-config", json.dumps(draft_model(folder)))
    assert [line for line in log.splitlines() if folder in line and said in line]


def test_damaged_target_is_refused(looping_llama: str, tmp_path: Path) -> None:
    folder, said = damaged("truncated", looping_llama, tmp_path / "target")
    with pytest.raises(ValueError, match=said), engine(folder):
        pytest.fail("it started")
