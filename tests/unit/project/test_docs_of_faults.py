"""Every test that docs/faults.md names is there, and can be run by that name."""

from __future__ import annotations

import re

from tests.pages import ROOT, names_of_tests

FOLDERS = (ROOT / "tests/full_tests", ROOT / "tests/unit")


def test_every_test_is_there() -> None:
    known: dict[str, set[str]] = {}
    for path in (path for folder in FOLDERS for path in folder.rglob("test_*.py")):
        known.setdefault(path.name, set()).update(names_of_tests(path))
    page = (ROOT / "docs/faults.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::([\w:]+))?`((?:, `test_\w+`)*)", page)
    assert len(named) > 15
    for file, test, more in named:
        assert file in known, file
        for name in filter(None, [test, *re.findall(r"`(test_\w+)`", more)]):
            assert name in known[file], f"{file} has no {name}"
