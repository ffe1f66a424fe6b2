"""The newcomer's path, as README.md has it."""

from tests.pages import ROOT, commands_for

README = ROOT / "README.md"
TAKEN_BY = "tests/full_tests/test_first_steps.py::test_first_steps_of_the_readme"


def commands() -> list[str]:
    return commands_for(TAKEN_BY, README)
