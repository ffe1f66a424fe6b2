"""What users asked to be written appears whole or not at all, and what cannot be is said before the work."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from vllm_gaudi_spec.environment import cached_files
from vllm_gaudi_spec.tools.io import output


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    output.write_json({"a": 1}, str(file))
    assert json.loads(file.read_text()) == {"a": 1}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_gaudi_spec.tools.io.output.os.fsync", full)
    with pytest.raises(output.NotWritten, match=r"--json .*run.json cannot be written: No space left on device"):
        output.write_json({"a": 2}, str(file))
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file], "nothing of the attempt is left"


def test_links_and_rights_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "kept", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to("kept")
    (tmp_path / "further").symlink_to(link)
    output.write("--json", tmp_path / "further", b"new")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o600)
    before = os.umask(0o027)
    try:
        output.write("--json", tmp_path / "fresh", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o640


def test_what_nobody_named_is_replaced_whatever_it_is(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "kept", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    os.mkfifo(pipe)
    before = os.umask(0o077)
    try:
        for path in (link, pipe):
            cached_files.replace(path, b"new", 0o644)
    finally:
        os.umask(before)
    for path in (link, pipe):
        assert stat.S_ISREG(path.lstat().st_mode)
        assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o644)
    assert target.read_text() == "old"


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """As a shell's >(...), and /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        output.write("--json", pipe, b"heard")
        assert os.read(reader, 100) == b"heard"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert output.mistake("--json", pipe) is None
    assert output.mistake("--json", "/dev/null") is None


WRITING = """\
import sys
from vllm_gaudi_spec.tools.io import output
if mistake := output.mistake("--json", sys.argv[1]):
    sys.exit(mistake)
for name in sys.argv[2:]:
    print("before", file=getattr(sys, name))
output.write_json({"a": 1}, sys.argv[1])
for name in sys.argv[2:]:
    print("after", file=getattr(sys, name))
"""
WRITTEN = 'before\n{\n  "a": 1\n}\nafter\n'


def in_a_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`$writing FILE STREAM` writes JSON to the one, and prints to the other before and afterwards."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WRITING": WRITING, "PYTHON": sys.executable}
    environment.pop("PYTHONUNBUFFERED", None)
    line = f'writing() {{ "$PYTHON" -c "$WRITING" "$@"; }}\n{line}'
    command = ["bash", "-c", line]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False)


def test_a_stream_of_ones_own_by_its_name(tmp_path: Path) -> None:
    """Into a pipe, and into a file: the log stays the one that is written, and nothing of it is lost."""
    (tmp_path / "link").symlink_to("/dev/stderr")
    for where in ("/dev/stderr", "link"):
        done = in_a_shell(f"writing {where} stderr", tmp_path)
        assert (done.stdout, done.stderr) == ("", WRITTEN), where
        assert in_a_shell(f"echo first > log; writing {where} stderr 2>> log", tmp_path).returncode == 0
        assert (tmp_path / "log").read_text() == f"first\n{WRITTEN}", where
        done = in_a_shell(f"exec 2> log; echo first >&2; writing {where} stderr; echo last >&2", tmp_path)
        assert (tmp_path / "log").read_text() == f"first\n{WRITTEN}last\n", where
    assert in_a_shell("writing /dev/stdout stdout | cat", tmp_path).stdout == WRITTEN
    assert in_a_shell("writing /dev/stdout stdout > log", tmp_path).returncode == 0
    assert (tmp_path / "log").read_text() == WRITTEN


def test_a_stream_of_another_process(tmp_path: Path) -> None:
    done = in_a_shell("exec 5>> log; echo first >&5; writing /proc/$$/fd/5 stderr; echo last >&5", tmp_path)
    assert (done.stderr, (tmp_path / "log").read_text()) == ("before\nafter\n", 'first\n{\n  "a": 1\n}\nlast\n')


def test_a_shells_process_substitution(tmp_path: Path) -> None:
    done = in_a_shell("writing >(cat) stderr | cat", tmp_path)  # The pipe ends when both have ended.
    assert (done.stdout, done.stderr) == ('{\n  "a": 1\n}\n', "before\nafter\n")


@pytest.mark.parametrize("where", ["/dev/fd/9", "/dev/fd/0", "/proc/self/fd/none"])
def test_a_descriptor_that_can_not_be_written(where: str, tmp_path: Path) -> None:
    done = in_a_shell(f"writing {where} stderr < /dev/null", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"--json {where} cannot be written; name another file\n")


def test_rights_are_asked_of_a_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    file.write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: path == file)  # root may write everywhere
    assert output.mistake("--json", file) is None
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)
    assert output.mistake("--json", file) == f"--json {file} cannot be written; name another file"
    with pytest.raises(output.NotWritten, match="cannot be written: Permission denied"):
        output.write("--json", file, b"new")
    assert file.read_text() == "old"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV])
@pytest.mark.parametrize("where", ["os.replace", "os.open"])
def test_a_file_that_takes_no_other_in_its_place_is_written_where_it_stands(
    where: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that is read-only, or mounted on its own."""
    file = tmp_path / "run.json"
    file.write_text("an old text")
    inode = file.stat().st_ino

    open_file = os.open

    def refuse(*args: Any) -> int:
        if where == "os.open" and not args[1] & os.O_EXCL:  # of a file that is there
            return open_file(*args)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(f"vllm_gaudi_spec.tools.io.output.{where}", refuse)
        output.write("--json", file, b"new")
        with pytest.raises(output.NotWritten):
            output.write("--json", tmp_path / "fresh", b"")
    assert (file.read_text(), file.stat().st_ino) == ("new", inode)
    assert list(tmp_path.iterdir()) == [file]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output.mistake("--json", None) is None
    assert output.mistake("--json", "-") is None
    assert output.mistake("--json", "run.json") is None
    # A model's name after --json is taken for a file.
    assert output.mistake("--json", "some/model") == (
        f"there is no folder {tmp_path}/some for --json some/model; make it first, or put --json last to print"
    )
    assert output.mistake("--report", "some/page").endswith("make it first")  # type: ignore[union-attr]
    assert output.mistake("--json", tmp_path) == f"--json {tmp_path} is a folder; name a file"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    assert output.mistake("--json", "run.json") == "--json run.json cannot be written; name another file"
