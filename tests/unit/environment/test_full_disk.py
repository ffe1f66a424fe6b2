"""A full disk costs a cache, never an answer: no half file is left, and older files stay whole."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8_calibration.writing import write_files
from vllm_gaudi_spec.environment import cache_folder
from vllm_gaudi_spec.quantization import files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file can be made, as on a full disk, and nothing can be written to it: the kernel itself says so."""
    with monkeypatch.context() as patch:
        open_file = os.open

        def opened(path: Any, flags: int, *mode: int, **named: Any) -> int:
            descriptor = open_file(path, flags, *mode, **named)
            if not flags & os.O_EXCL:
                return descriptor
            os.close(descriptor)
            return open_file("/dev/full", os.O_WRONLY)

        patch.setattr(os, "open", opened)
        yield


def kept(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_measurements_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    prefix = tmp_path / "measured" / "P"
    older = record(1.0)
    path = write_files(prefix, older)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    request.getfixturevalue("full_disk")
    with pytest.raises(files.QuantFilesError, match=r"cannot be written: No space left on device"):
        write_files(prefix, record(2.0))
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def record(largest: float) -> files.Record:
    node = files.Node([np.full((1, 1), largest, np.float32)], [], {})
    return files.Record(rank=0, world=1, mode=files.MEASURED, nodes={"layer": node}, looked_at=["layer"])
