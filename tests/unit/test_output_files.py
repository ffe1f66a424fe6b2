"""What users asked to be written appears whole or not at all, and what can not be is said before the work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vllm_gaudi_spec import output_files


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    output_files.write_json({"a": 1}, str(file))
    assert json.loads(file.read_text()) == {"a": 1}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_gaudi_spec.output_files.os.fsync", full)
    with pytest.raises(output_files.NotWritten, match=r"--json .*run.json can not be written: No space left on device"):
        output_files.write_json({"a": 2}, str(file))
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file], "nothing of the attempt is left"


def test_links_and_rights_stay(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("old")
    kept.chmod(0o600)
    link.symlink_to(kept)
    output_files.replace(link, b"new")
    assert link.is_symlink()
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("new", 0o600)
    before = os.umask(0o027)
    try:
        output_files.replace(tmp_path / "fresh", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """As a shell's >(...), and /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        output_files.write("--json", pipe, b"heard")
        assert os.read(reader, 100) == b"heard"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert output_files.mistake("--json", pipe) is None
    assert output_files.mistake("--json", "/dev/null") is None


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_files.mistake("--json", None) is None
    assert output_files.mistake("--json", "-") is None
    assert output_files.mistake("--json", "run.json") is None
    # A model's name behind --json is taken for a file.
    assert output_files.mistake("--json", "some/model") == (
        f"there is no folder {tmp_path}/some for --json some/model; make it first, or put --json last to print"
    )
    assert output_files.mistake("--report", "some/page").endswith("make it first")  # type: ignore[union-attr]
    assert output_files.mistake("--json", tmp_path) == f"--json {tmp_path} is a folder; name a file"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    assert output_files.mistake("--json", "run.json") == "--json run.json can not be written; name another file"
