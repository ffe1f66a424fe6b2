"""Files that users name appear whole or not at all; tables and progress depend on whether there is a terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from vllm_gaudi_spec.tools.io import output


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    output.write_json({"a": 1}, str(file))

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(output.NotWritten, match="No space left on device"):
        output.write_json({"a": 2}, str(file))
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "line", ["write /dev/stdout > log", "write >(cat >> log) >> log; sleep 1", "write /dev/stdout | cat > log"]
)
def test_streams_of_a_shell_are_written_into(line: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom vllm_gaudi_spec.tools.io import output\n"
        "assert output.find_mistake('--json', sys.argv[1]) is None\n"
        "print('before')\noutput.write_json({'a': 1}, sys.argv[1])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CODE": code, "PYTHON": sys.executable}
    command = ["bash", "-c", f'write() {{ "$PYTHON" -c "$CODE" "$@"; }}\n{line}']
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=True)
    assert sorted((tmp_path / "log").read_text().split()) == sorted(["before", "{", '"a":', "1", "}"])


def test_a_protected_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    file.write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)  # root may write everywhere
    assert output.find_mistake("--json", file) is not None
    with pytest.raises(output.NotWritten, match="Permission denied"):
        output.write("--json", file, b"new")
    assert file.read_text() == "old"


def test_mistakes_are_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for fine in (None, "-", "run.json"):
        assert output.find_mistake("--json", fine) is None
    # A model's name after --json is taken for a file.
    assert "put --json last" in str(output.find_mistake("--json", "some/model"))
