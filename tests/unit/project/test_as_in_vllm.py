"""Pages about vLLM's features and flags state what its parser and configuration do, and name tests that exist."""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.releases import make_arg_parser
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.platforms import base

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "docs" / "reference" / "features.md", ROOT / "docs" / "how_to" / "migrate.md")
MODEL = ROOT / "demo" / "tiny" / "target"


class Row(NamedTuple):
    what: str
    here: str
    notes: str

    @property
    def flags(self) -> list[str]:
        """Of the command line, which stand between backticks in the first cell."""
        return [word for code in re.findall(r"`(-[^`]*)`", self.what) for word in shlex.split(code)]


def read_rows(page: Path) -> list[Row]:
    """Return the rows of the tables whose second column says what happens here."""
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)
    found = [[line.strip().strip("|").split("|") for line in text.splitlines()] for text in tables]
    return [Row(*map(str.strip, row)) for head, _, *rows in found if head[1].strip() == "here" for row in rows]


ROWS = [row for page in PAGES for row in read_rows(page)]
# The tests that show what a row says, by its first cell
TESTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("as_in_vllm.json").read_text())
# `inc` needs a file: tests/unit/upstream/test_configuration.py has that.
WITH_FLAGS = [row for row in ROWS if row.flags and "QUANT_CONFIG" not in row.what]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


def outcome(flags: list[str], parser: FlexibleArgumentParser, warnings: list[str]) -> str:
    """What the front end does with them. A refusal is an error of one line."""
    small = ["--model", str(MODEL), "--dtype", "float32", "--max-model-len", "256"]
    args = parser.parse_args([*small, *flags])
    try:
        AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except ValueError as error:
        reason = str(error)
        # vLLM's own are reports of pydantic's, of which the command line shows one line.
        assert len(reason.splitlines()) == 1 or "Value error, " in reason, reason
        return "rejected"
    return "ignored" if warnings else "works"


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(base.logger, "warning_once", lambda text, *values: found.append(text % values))
    return found


# vLLM reports itself that it does not compile; a CPU captures nothing.
QUIET = ("--enforce-eager", "--compilation-config")


@pytest.mark.parametrize("row", WITH_FLAGS, ids=lambda row: " ".join(row.flags)[:60])
def test_flags(row: Row, parser: FlexibleArgumentParser, warnings: list[str]) -> None:
    upstream.apply()
    found = outcome(row.flags, parser, warnings)
    if any(flag in QUIET for flag in row.flags):
        assert (row.here, found) == ("ignored", "works")
    else:
        assert row.here == found, warnings
    for warning in warnings:
        assert any(flag.removeprefix("--").split("-")[0] in warning.lower() for flag in row.flags), warning


def test_every_row_is_listed_with_its_tests() -> None:
    assert list(TESTS) == [row.what for row in ROWS]


@pytest.mark.parametrize("name", sorted({name for names in TESTS.values() for name in names}))
def test_listed_test_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert f"\ndef {function}(" in (ROOT / file).read_text()
