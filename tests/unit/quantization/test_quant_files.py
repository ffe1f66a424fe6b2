"""Files in the layout of Intel Neural Compressor: written whole, and refused in one line when they are not right."""

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8_calibration.scales import expand
from fp8_calibration.writing import write_files
from tests.support.measurements import MODEL, measured, same
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.files import QuantFilesError
from vllm_gaudi_spec.quantization.pickles import list_calls


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Two ranks' measurements."""
    prefix = tmp_path / "stats" / "inc"
    for record in expand(measured(), 2):
        write_files(prefix, record)
    return prefix


def test_names_are_those_of_neural_compressor(prefix: Path) -> None:
    names = {path.name for path in prefix.parent.iterdir()}
    for rank in (0, 1):
        assert {f"inc_hooks_maxabs_{rank}_2{end}" for end in (".json", ".npz", "_mod_list.json")} <= names
    assert len(names) == 6
    assert files.stem(prefix, 1, 2, "maxabs_hw").name == "inc_hooks_maxabs_MAXABS_HW_1_2"


def test_written_files_are_read_back(prefix: Path) -> None:
    for read, written in zip(files.read_world(prefix), expand(measured(), 2), strict=True):
        same(read, written)
        assert (read.rank, read.world, read.mode) == (written.rank, 2, files.MEASURED)
        assert (read.model, read.linears, read.looked_at) == (MODEL, written.linears, written.looked_at)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def rename_rank(path: Path) -> None:
    path.write_text(Path(str(path).replace("_1_2", "_0_2")).read_text())


def break_value(path: Path) -> None:
    stored = json.loads(path.read_text())
    stored["Nodes"]["model.layers.1.mlp.down_proj"]["params"]["weight"][5] = [float("nan")]
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("end", "damage", "message"),
    [
        (".json", Path.unlink, r"_1_2\.json is missing"),
        (".npz", Path.unlink, r"_1_2\.npz is missing"),
        (".json", cut, r"_1_2\.json is truncated"),
        (".npz", cut, r"_1_2\.npz is truncated or damaged"),
        (".npz", spoil, r"_1_2\.npz is damaged"),
        (".json", rename_rank, r"_1_2\.json is of rank 0"),
        (".json", break_value, "values that are not maxima"),
        (".json", lambda path: path.write_text("[]"), "is truncated or not such a file"),
        ("_mod_list.json", cut, "is truncated or not such a file"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    prefix: Path, end: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(Path(f"{prefix}_hooks_maxabs_1_2{end}"))
    with pytest.raises(QuantFilesError, match=message) as refused:
        files.read_world(prefix)
    assert "\n" not in str(refused.value)


def test_wrong_world_size_is_refused(prefix: Path) -> None:
    with pytest.raises(QuantFilesError, match="are for world size 2, not 4"):
        files.read_world(prefix, 4)
    with pytest.raises(QuantFilesError, match="no scale files"):
        files.read_world(prefix, 2, "maxabs_hw")
    write_files(prefix, measured())
    with pytest.raises(QuantFilesError, match=r"several world sizes .* choose one of \[1, 2\]"):
        files.read_world(prefix)
    assert len(files.read_world(prefix, 2)) == 2


def test_ranks_of_different_models_are_refused(prefix: Path) -> None:
    first, second = expand(measured(), 2)
    write_files(prefix, replace(second, model="f" * 16))
    with pytest.raises(QuantFilesError, match=rf"rank 1 .* another model \({'f' * 16}, not {MODEL}\)"):
        files.read_world(prefix)
    write_files(prefix, replace(second, looked_at=[*first.looked_at, "lm_head"]))
    with pytest.raises(QuantFilesError, match="lm_head is in only one of the two"):
        files.read_world(prefix)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


# What a file may hold besides arrays: how a pickle names what it calls, straight and through detours.
HOSTILE = [
    b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    b"cos\nsystem\n.",
    b"(S'x'\nios\nsystem\n.",
    b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940\x8c\x05numpy\x94\x8c\x07ndarray0h\x00h\x01\x93.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x05numpy\x8c\x07ndarray00\x93.",
    b"\x80\x02\x82\x01.",
    b"Pname\n.",
]


@pytest.mark.parametrize("content", HOSTILE)
def test_calls_of_a_pickle_are_found(content: bytes) -> None:
    assert any(not name.startswith("numpy.") for name in list_calls(content))


def test_hostile_npz_is_refused(prefix: Path) -> None:
    """INC unpickles it, on a Gaudi without our reading anything; its JSON is beyond doubt."""
    files.check_harmless(prefix)
    np.savez(f"{prefix}_hooks_maxabs_1_2.npz", np.array({"Nodes": Bomb()}))
    for attempt in (files.read_world, files.check_harmless):
        with pytest.raises(QuantFilesError, match=r"would call \w+\.system when it is read"):
            attempt(prefix)


def npy_of_a_pickle() -> bytes:
    written = io.BytesIO()
    np.save(written, np.array({"Nodes": Bomb()}))
    return written.getvalue()


@pytest.mark.parametrize("front", [HOSTILE[0], HOSTILE[1], npy_of_a_pickle()], ids=["pickle", "text pickle", "npy"])
def test_archive_after_a_pickle_is_refused(front: bytes, prefix: Path) -> None:
    """zipfile finds the archive from the file's end; numpy looks at the beginning, and would run what stands there."""
    path = Path(f"{prefix}_hooks_maxabs_1_2.npz")
    path.write_bytes(front + path.read_bytes())
    for attempt in (files.read_world, files.check_harmless):
        with pytest.raises(QuantFilesError, match=r"_1_2\.npz is truncated or damaged"):
            attempt(prefix)
