"""`gaudi-spec report`: records of runs as one page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.output import FINE, STDOUT, fail

DESCRIPTION = """\
Write one HTML page about recorded runs (`gaudi-spec demo --json RUN.json`): throughput and speedup, latency, a decode
step in its parts, mean acceptance length, per-position acceptance rates, the texts with accepted tokens marked, graphs,
device-to-host syncs, and the command that repeats the run. Several records are compared; of one model at several values
of --batch-size, the speedup is drawn against concurrency. The page is one file without scripts, and loads no other.

Examples:
  gaudi-spec demo --batch-size 1 --json 1.json
  gaudi-spec demo --batch-size 4 --json 4.json
  gaudi-spec report 1.json 4.json

Exit status: 0 when the page is written, 2 when a record cannot be read or for wrong options.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="make a report page (HTML) of recorded runs",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN.json",
        help="a record that `gaudi-spec demo --json` wrote",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page")
    output.add_json(parser.add_argument, "the figures of the page")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from vllm_gaudi_spec.tools.report import page, record

    for option, file in (("--output", options.output), ("--json", options.json)):
        if mistake := output.mistake(option, file):
            return fail("report", mistake)
    # `--json A.json B.json` takes A.json for the file to write, and for no run.
    if options.json not in (None, STDOUT) and record.is_record(options.json):
        return fail(
            "report", f"--json would overwrite the record {options.json}; write --json=FILE, or put --json last"
        )
    if record.is_record(options.output):
        return fail("report", f"--output would overwrite the record {options.output}; name another file")
    try:
        runs = [page.Run(str(path), record.read(path)) for path in options.runs]
        page.write(runs, options.output)
    except (record.RecordError, OSError) as error:
        return fail("report", str(error))
    output.write_json(page.summary(runs), options.json)
    if options.json != STDOUT:
        print(f"report: {options.output.absolute()}")
    return FINE
