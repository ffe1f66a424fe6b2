"""The tables of docs/gaudi_lessons.md and docs/ascend_lessons.md: their tests exist, and tests that carry a row's
number are in them. Those of the NPU have `npu` before the number; a second table of theirs has tests of other names."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = {"": "gaudi_lessons.md", "npu_": "ascend_lessons.md"}
"""By what is in front of the numbers in the names of tests."""
LAST = {"S": 28, "L": 33, "C": 35, "O": 39, "A": 32, "M": 18, "Q": 24, "R": 17, "N": 12, "H": 15, "V": 13, "P": 13}
"""Rows by their letters. There is no M16."""
OTHER_NAMES = "## Tests of other names"


def page(prefix: str) -> str:
    return (ROOT / "docs" / PAGES[prefix]).read_text()


def rows_of_tests(prefix: str) -> dict[str, set[str]]:
    found = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name, rows in re.findall(rf"def (test_{prefix}((?:[a-z]\d\d_)+)\w+)\(", path.read_text()):
            for row in rows.upper().split("_")[:-1]:
                found[row].add(name)
    return found


def rows_of_the_table(prefix: str) -> dict[str, set[str]]:
    return rows_in(page(prefix).partition("## Not shown")[0].partition(OTHER_NAMES)[0])


def rows_in(text: str) -> dict[str, set[str]]:
    lines = re.findall(r"^\| ([A-Z]\d\d) \|(.*)\|$", text, re.MULTILINE)
    assert len(lines) == len(dict(lines)), "a row stands twice"
    return {row: set(re.findall(r"`(test_\w+)`", rest)) for row, rest in lines}


@pytest.mark.parametrize("prefix", PAGES)
def test_each_row_has_the_tests_that_carry_its_number(prefix: str) -> None:
    found, listed = rows_of_tests(prefix), rows_of_the_table(prefix)
    assert found.keys() == listed.keys()
    for row in found:
        assert found[row] == listed[row], row


def test_rows_are_shown_or_have_a_reason() -> None:
    shown = rows_of_the_table("").keys()
    reasons = re.findall(r"^\| ([A-Z]\d\d) \|", page("").partition("## Not shown")[2], re.MULTILINE)
    every = [f"{letter}{number:02}" for letter, last in LAST.items() for number in range(1, last + 1)]
    every.remove("M16")
    assert sorted([*shown, *reasons]) == sorted(every)
    assert len(shown) >= 80


def test_lessons_of_npus_whose_tests_have_other_names() -> None:
    """They exist, and the page's number is that of its rows."""
    every = rows_in(page("npu_"))
    assert f" {len(every)} rows of the 168 " in page("npu_").replace("\n", " ")
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    exist = set(re.findall(r"def (test_\w+)\(", written))
    for row, tests in rows_in(page("npu_").partition(OTHER_NAMES)[2]).items():
        assert tests, row
        assert tests <= exist, row
