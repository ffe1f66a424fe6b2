"""`gaudi-spec report`: creates an HTML page from recorded runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.tools.io.output import FINE, fail, find_mistake

DESCRIPTION = """\
Write one HTML page about recorded runs (`gaudi-spec demo --json RUN.json`): throughput and speedup, acceptance,
latency, the texts with accepted tokens marked, graphs, device-to-host syncs, and the command that repeats the run.
Several records are compared. The page is one file without scripts, and loads no other file.

Example:
  gaudi-spec demo --batch-size 1 --json 1.json
  gaudi-spec demo --batch-size 4 --json 4.json
  gaudi-spec report 1.json 4.json

Exit status: 0 if the page is written, 2 if a record cannot be read or for invalid options.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "report", help="create a report page (HTML) from recorded runs", description=DESCRIPTION
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN.json", help="a record that `gaudi-spec demo --json` wrote")
    add("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page to write")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from jinja2 import UndefinedError

    from vllm_gaudi_spec.tools.report import page, record

    if mistake := find_mistake("--output", options.output):
        return fail("report", mistake)
    if record.is_record(options.output):
        return fail("report", f"--output would overwrite the record {options.output}; name another file")
    try:
        runs = [page.Run(str(path), record.read(path)) for path in options.runs]
    except record.RecordError as error:
        return fail("report", str(error))
    for run in runs:
        try:
            page.render([run])
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, UndefinedError) as error:
            return fail("report", f"{run.name} is damaged ({type(error).__name__}: {error}); record the run again")
    page.write(runs, options.output)
    print(f"report: {options.output.absolute()}")
    return FINE
