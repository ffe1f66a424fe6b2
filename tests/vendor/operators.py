"""vllm-gaudi's own tests on the emulated card, as they are, beside what is known of them."""

import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.vendor.known import KNOWN_FAILURES

_ENDED = (0, 1)
"""pytest's statuses where all tests were run: none failed, some did."""


@dataclass(kw_only=True)
class Outcome:
    file: str
    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Names with the first line of what they ended with."""
    surprises: list[str] = field(default_factory=list)


def run(python: str, folder: Path, file: str, variables: Mapping[str, str], out: Path, seconds: int = 3600) -> Outcome:
    report = out / f"{Path(file).stem}.xml"
    report.unlink(missing_ok=True)
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={report}",
        f"tests/unit_tests/{file}",
    ]
    with (out / f"{Path(file).stem}.log").open("w") as log:
        try:
            status = subprocess.run(
                command, cwd=folder, env=dict(variables), stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            return Outcome(file=file, surprises=[f"{file}: not done after {seconds} s, see {log.name}"])
    if not report.is_file():
        return Outcome(file=file, surprises=[f"{file}: no test ran, see {log.name}"])
    outcome = judge(file, report)
    if status not in _ENDED:
        outcome.surprises.append(f"{file}: pytest ended with {status}, see {log.name}")
    if not (outcome.passed or outcome.failed):
        outcome.surprises.append(f"{file}: no test ran, see {log.name}")
    return outcome


def judge(file: str, report: Path, known: Mapping[str, str] = KNOWN_FAILURES) -> Outcome:
    outcome = Outcome(file=file)
    expected = {name.partition("::")[2]: reason for name, reason in known.items() if name.startswith(f"{file}::")}
    as_expected: set[str] = set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        listed = {start for start in expected if name.startswith(start)}
        ended = [part for part in case if part.tag in ("failure", "error")]
        if ended:
            outcome.failed[name] = (ended[0].get("message") or "").split("\n")[0]
            as_expected |= listed
            if not listed:
                outcome.surprises.append(f"{file}::{name} failed: {outcome.failed[name]}")
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
            outcome.surprises += [f"{file}::{name} passed, and is listed as failing: {expected[s]}" for s in listed]
    outcome.surprises += [f"{file}::{name} did not fail" for name in expected.keys() - as_expected]
    return outcome


def table(outcomes: Iterable[Outcome]) -> list[str]:
    lines = [
        "| tests of vllm-gaudi | passed | skipped | failed, all for a listed reason |",
        "| --- | --- | --- | --- |",
    ]
    for one in outcomes:
        lines.append(f"| `{one.file}` | {one.passed} | {one.skipped} | {len(one.failed)} |")
    return lines
