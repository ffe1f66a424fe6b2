"""The newcomer's path, as README.md has it, and the site's quick start."""

from tests.pages import ROOT, commands_for

README = ROOT / "README.md"
QUICK_START = ROOT / "docs" / "quick_start.md"
TAKEN_BY = "tests/full_tests/test_first_steps.py::test_the_path"
SCREEN = 46
"""Lines that are seen before anybody scrolls."""


def commands() -> list[str]:
    return commands_for(TAKEN_BY, README)
