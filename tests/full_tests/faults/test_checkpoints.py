"""A damaged checkpoint ends the start with one line that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.full_tests.engines import engine
from tests.full_tests.test_startup import failed_start

WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.slow


def truncate(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop_a_part(folder: Path) -> None:
    first, second = (f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    parts = dict.fromkeys(load_file(folder / WEIGHTS), first) | {"x": second}
    (folder / WEIGHTS).rename(folder / first)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))


def narrow(folder: Path) -> None:
    weights = {name: tensor[..., :-8].contiguous() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "is damaged or was only half written"),
    "without a part": (drop_a_part, "model-00002-of-00002.safetensors, which is missing"),
    "other shapes": (narrow, "cannot be loaded"),
    "without a configuration": (lambda folder: (folder / "config.json").unlink(), "config"),
}


@pytest.mark.parametrize("serves", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_damaged_drafter_is_refused(case: str, serves: bool, looping_llama: str, cousin: str, tmp_path: Path) -> None:
    damage, said = CASES[case]
    folder = str(shutil.copytree(cousin, tmp_path / "drafter"))
    damage(Path(folder))
    config: dict[str, Any] = dict(method="draft_model", model=folder, num_speculative_tokens=3)
    if serves:
        log = failed_start(looping_llama, "--speculative-config", json.dumps(config))
        assert [line for line in log.splitlines() if folder in line and said in line]
        return
    with pytest.raises((ValueError, OSError)) as raised, engine(looping_llama, speculative_config=config):
        pytest.fail("it started")
    assert folder in str(raised.value)
    assert said in str(raised.value)


def test_damaged_target_is_refused(looping_llama: str, tmp_path: Path) -> None:
    truncate(shutil.copytree(looping_llama, tmp_path / "target"))
    with pytest.raises(ValueError, match=CASES["truncated"][1]), engine(str(tmp_path / "target")):
        pytest.fail("it started")
