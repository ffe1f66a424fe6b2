"""The runner of the benchmarks finds every program, and each parses its options."""

import sys

import pytest

from benchmarks.__main__ import PROGRAMS, main

NAMES = [path.stem for path in PROGRAMS]


@pytest.mark.parametrize("name", NAMES)
def test_program_explains_its_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # main replaces it
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out
