"""Run a selection of vLLM's own tests on our CPU device, and what does not pass there on vLLM's CPU platform.

They come from vLLM's source distribution, of the release and hash in requirements/card-source.txt, and stay in
.verify/upstream/. selection.toml lists the files and the known differences, adapter.py adapts devices and sources.py
models. Each file has a result in .verify/upstream/results/, written after each case, so an interrupted run continues
where it stopped. Exit status 1: a case that passes there does not pass here and is not listed, or the run is not over.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.upstream import adapter, sources
from tests.upstream.sources import PACKAGES, ROOT, SOURCE, STATE
from tests.verify import tree_hash

HERE = Path(__file__).resolve().parent
SIDES = OURS, UPSTREAM = "ours", "upstream"
SECONDS_PER_CASE = 300
SECONDS_TO_STOP = 60
PASSED, FAILED = "passed", "failed"

Cases = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class File:
    """A file of the selection. `only` and `without` are patterns of its cases, `differs` maps patterns to reasons."""

    name: str
    only: tuple[str, ...] = ("*",)
    without: tuple[str, ...] = ()
    differs: dict[str, str] = field(default_factory=dict, hash=False)

    def results(self, side: str) -> Path:
        return STATE / "results" / side / f"{self.name.replace('/', '-').removesuffix('.py')}.json"

    def read(self, side: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self.results(side).read_text()))
        except (OSError, ValueError):
            return {}


@dataclass(frozen=True)
class Selection:
    """The content of selection.toml, whose comments explain each part."""

    files: list[File]
    models: dict[str, list[str]]
    refused: dict[str, str]


def read_selection(path: Path) -> Selection:
    given = tomllib.loads(path.read_text())
    files = []
    for name, options in given["files"].items():
        if unknown := options.keys() - {"only", "without", "differs"}:
            raise ValueError(f"{path.name}: {name} has unknown keys: {', '.join(sorted(unknown))}")
        files.append(File(name, **{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}))
    return Selection(files, given["models"], given["refused"])


# ---- compare ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The results of both sides for a file.

    A case differs if it passes upstream and fails or is skipped here.
    """

    file: File
    ours: Cases
    upstream: Cases
    refused: dict[str, str]
    is_over: bool
    is_stale: bool

    @property
    def differences(self) -> dict[str, str | None]:
        """Map each case that differs to its listed reason, or None."""
        candidates = self.upstream if adapter.COLLECTION in self.ours else self.ours
        found = [case for case in candidates if not passes(self.ours, case) and passes(self.upstream, case)]
        return {case: self._reason(case) for case in found}

    def _reason(self, case: str) -> str | None:
        listed = [why for pattern, why in self.file.differs.items() if fnmatchcase(case, pattern)]
        listed += [why for text, why in self.refused.items() if text in self._message(case)]
        return listed[0] if listed else None

    def _message(self, case: str) -> str:
        return str((self.ours.get(case) or self.ours[adapter.COLLECTION])["message"])

    @property
    def new(self) -> dict[str, str]:
        """Map each case that differs without a listed reason to its message here."""
        new = [case for case, reason in self.differences.items() if reason is None]
        return {case: self._message(case) for case in new}

    @property
    def verdict(self) -> str:
        known = len(self.differences) - len(self.new)
        needless = [p for p in self.file.differs if not any(fnmatchcase(case, p) for case in self.differences)]
        parts = [f"{len(self.new)} NEW"] if self.new else []
        parts += [f"{known} known"] if known else []
        parts += [f"listed, but equal: {', '.join(needless)}"] if needless and self.is_over else []
        parts += [] if self.is_over else ["not over"]
        parts += ["of an earlier checkout"] if self.is_stale else []
        return ", ".join(parts) or "equal"


def passes(cases: Cases, case: str) -> bool:
    return cases.get(case, {}).get("outcome") == PASSED


def compare(file: File, current: dict[str, str], refused: dict[str, str]) -> Row:
    cases = [file.read(side).get("cases", {}) for side in SIDES]
    over = all(is_over(file, side) for side in SIDES)
    return Row(file, *cases, refused, is_over=over, is_stale=any(is_stale(file, side, current) for side in SIDES))


def show(rows: list[Row]) -> None:
    print("\nfile | cases | ours | upstream | verdict\n--- | --- | --- | --- | ---")
    for row in rows:
        print(f"{row.file.name} | {len(row.ours)} | {counts(row.ours)} | {counts(row.upstream)} | {row.verdict}")
        for case, message in row.new.items():
            print(f"    NEW {case}: {message}")
    cases = {f"{row.file.name}::{case}": result for row in rows for case, result in row.ours.items()}
    print(
        f"\n{sum(bool(row.ours) for row in rows)} of {len(rows)} files, {len(cases)} cases here: {counts(cases)}; ",
        end="",
    )
    differences, new = sum(len(row.differences) for row in rows), sum(len(row.new) for row in rows)
    print(f"{differences - new} known differences, {new} new", flush=True)


def counts(cases: Cases) -> str:
    found = Counter(case["outcome"] for case in cases.values())
    return ", ".join(f"{found[name]} {name}" for name in (PASSED, FAILED, "skipped") if found[name]) or "-"


# ---- run --------------------------------------------------------------------------------------------------


def environment(side: str, job: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name not in ("VGS_DEVICE", "VLLM_PLUGINS")}
    paths = [STATE / "source", STATE / "site", HERE, ROOT, ROOT / "card_emulator" / "src"]
    found |= {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), found.get("PATH", ""))),
        "VERIFY_UPSTREAM_SIDE": side,
        "VERIFY_UPSTREAM_JOB": str(job),
        "HF_HOME": str(STATE / "home"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VGS_SKIP_WARMUP": "1",
    }
    return found | ({"VGS_DEVICE": "cpu"} if side == OURS else {"VLLM_PLUGINS": "verify_upstream"})


def needed(file: File, side: str) -> list[str] | None:
    """Return the cases to run, or None for all: on upstream's platform only those that do not pass here."""
    if side == OURS:
        return None
    cases = file.read(OURS).get("cases", {})
    failed = [case for case in cases if not passes(cases, case)]
    return None if adapter.COLLECTION in failed else failed


def is_over(file: File, side: str) -> bool:
    found, cases = file.read(side), needed(file, side)
    if cases is None or not found:
        return cases == [] or bool(found.get("ended"))
    return set(cases) <= {*found["cases"], *((found["asked"] or ()) if found["ended"] else ())}


def is_stale(file: File, side: str, current: dict[str, str]) -> bool:
    return file.read(side).get("key", current[side]) != current[side]


def start(files: list[File], side: str, current: dict[str, str], keep: bool) -> Path:
    """Write what the adapter is to run, and drop results of other states of the checkout."""
    given = {}
    for file in files:
        path, cases, found = file.results(side), needed(file, side), file.read(side)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not found or (is_stale(file, side, current) and not keep):
            found = {"key": current[side], "cases": {}}
        write_json(path, found | {"asked": cases, "running": None, "ended": False})
        given[file.name] = {"results": str(path), "only": file.only, "without": file.without, "cases": cases}
    write_json(STATE / f"{side}-job.json", {"files": given})
    return STATE / f"{side}-job.json"


def run(files: list[File], side: str, job: Path) -> bool:
    """Run what is left of some files in one process; return whether a case ended it, so that the rest is still left."""
    command = [sys.executable, "-m", "pytest", "-p", "adapter", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["--continue-on-collection-errors"]  # a model that is missing at import concerns one file
    command += [f"--rootdir={STATE / 'source'}", f"--timeout={SECONDS_PER_CASE}"]
    command += [f"tests/{file.name}" for file in files]
    with (STATE / f"{side}.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=STATE / "source", env=environment(side, job), stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            stop(process)
    crashed = False
    for file in files:
        found = file.read(side)
        if case := found["running"]:
            crashed = True
            message = f"the process ended with status {status}"
            found["cases"][case] = {"outcome": FAILED, "seconds": 0, "message": message}
            write_json(file.results(side), found | {"running": None})
    return crashed


def write_json(path: Path, value: Any) -> None:
    """Replace a file at once, so that an interruption leaves the old one or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(value, indent=0))
    draft.replace(path)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, so that its fixtures end their servers, and end what is left of its session."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_STOP)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_folder(folder: Path, files: list[File], current: dict[str, str], keep: bool) -> None:
    for side in SIDES:
        left = [file for file in files if not is_over(file, side) or (is_stale(file, side, current) and not keep)]
        if side == UPSTREAM:
            left = [file for file in left if is_over(file, OURS)]
        while left:
            print(f"{folder}: {len(left)} files, {side}", flush=True)
            if not run(left, side, start(left, side, current, keep)):
                break
            left = [file for file in left if not is_over(file, side)]


def keys(models: dict[str, list[str]]) -> dict[str, str]:
    """Map each side to a key of everything that its results depend on."""
    made_of = [Path(module.__file__ or "").read_bytes() for module in (adapter, sources)]
    made_of += [json.dumps(models).encode(), *(path.read_bytes() for path in (SOURCE, PACKAGES))]
    return {OURS: tree_hash(), UPSTREAM: hashlib.sha256(b"".join(made_of)).hexdigest()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only files with one of these in their path")
    parser.add_argument("--fresh", action="store_true", help="run all of them again")
    parser.add_argument("--keep", action="store_true", help="keep results of earlier states of the checkout, marked so")
    parser.add_argument("--list", action="store_true", help="only print the table of what was run")
    options = parser.parse_args()
    selection = read_selection(HERE / "selection.toml")
    files = [file for file in selection.files if not options.words or any(word in file.name for word in options.words)]
    if not files:
        print("error: no file of the selection matches")
        return 2
    current = keys(selection.models)
    if options.fresh:
        shutil.rmtree(STATE / "results", ignore_errors=True)
    if not options.list:
        sources.prepare(selection.models)
        if missing := [file.name for file in files if not (STATE / "source" / "tests" / file.name).exists()]:
            print(f"error: not among the tests of this release: {', '.join(missing)}")
            return 2
        for folder, group in groupby(files, key=lambda file: Path(file.name).parent):
            run_folder(folder, list(group), current, options.keep)
    rows = [compare(file, current, selection.refused) for file in files]
    show(rows)
    return 0 if all(row.is_over and not row.new and not row.is_stale for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
