"""A drafter's folder that is damaged, or was made to do harm, ends the start with one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.full_tests.test_refusals import refusal
from tests.support.marks import quick_and_slow

DEMO = Path(__file__).parents[3] / "demo" / "tiny"
TARGET = str(DEMO / "target")
WEIGHTS = "model.safetensors"


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        file = folder / WEIGHTS
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return rewrite


def set_d2t(value: int) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors | {"d2t": torch.full_like(tensors["d2t"], value)})


def truncate(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop_a_part(folder: Path) -> None:
    first, second = (f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    parts = dict.fromkeys(load_file(folder / WEIGHTS), first) | {"x": second}
    (folder / WEIGHTS).rename(folder / first)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[..., :-8].contiguous() for name, tensor in tensors.items()}


def put_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


# Method, folder of the demo, what is done to it, and words of the refusal.
CASES: dict[str, tuple[str, str, Callable[[Path], None], str]] = {
    "missing matrices": (
        "eagle",
        "eagle",
        change_tensors(lambda tensors: dict(list(tensors.items())[:1])),
        "no weights for",
    ),
    "half of a file": ("eagle", "eagle", truncate, "is damaged or was only half written"),
    "a missing part": ("eagle", "eagle", drop_a_part, "model-00002-of-00002.safetensors, which is missing"),
    "other shapes": ("eagle", "eagle", change_tensors(narrow), "cannot be loaded"),
    "a pipe": ("eagle", "eagle", put_pipe, "it is not a file"),
    "missing layers": ("eagle3", "eagle3", change_config(eagle_aux_hidden_state_layer_ids=[1, 2, 10**9]), "layers [1"),
    "token ids above the vocabulary": ("eagle3", "eagle3", set_d2t(10**6), "outside of the target's vocabulary"),
    "token ids below the vocabulary": ("eagle3", "eagle3", set_d2t(-(10**6)), "outside of the target's vocabulary"),
}
QUICK = ("missing matrices", "missing layers")


@pytest.mark.parametrize("case", quick_and_slow(QUICK, CASES))
def test_hostile_drafter_is_refused(case: str, tmp_path: Path) -> None:
    method, name, damage, said = CASES[case]
    folder = shutil.copytree(DEMO / name, tmp_path / "drafter")
    damage(folder)
    spec_config = dict(method=method, model=str(folder), num_speculative_tokens=3)
    assert said in refusal(TARGET, speculative_config=spec_config)


@pytest.mark.slow
def test_damaged_target_is_refused(looping_llama: str, tmp_path: Path) -> None:
    truncate(shutil.copytree(looping_llama, tmp_path / "target"))
    assert "is damaged or was only half written" in refusal(str(tmp_path / "target"))
