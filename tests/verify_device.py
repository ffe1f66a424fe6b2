"""For the first owner of a card: everything that has only been seen on the emulated one, in one command.

    make verify-gaudi                   on a machine with a Gaudi, in Intel's image
    make verify-ascend                  on a machine with an Ascend NPU and torch_npu
    make verify-gaudi ARGS=--rehearse   the same on the emulated card, to see that the command works

make takes .venv's Python where there is one, else python3; another one: PYTHON -m tests.verify_device gaudi, from the
root of the checkout. It needs vLLM, this project, card_emulator/, pytest and pytest-timeout (requirements/dev.txt).

Runs the self-test, the conformance suite and the full tests on the card, then graph-check with one workload on the card
and on the emulated one, each in a process of its own, and compares what both counted. Writes report.json, and
report.md, which can be pasted into the device's page in docs/, into .verify/gaudi/ or .verify/ascend/; and all of that
with doctor's findings and the logs into one archive beside it, gaudi.tar.gz or ascend.tar.gz, to send.

Exit status: 0 when tests passed and counts agree, 1 when not, 2 when there is no card or options make no sense.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import device_table
from vllm_gaudi_spec.environment import gaudi_has_lazy_mode

ROOT = Path(__file__).resolve().parents[1]
DEMO_DRAFTER = ROOT / "demo" / "draft-same-vocab"
SECONDS_PER_FILE = 3600


@dataclass(frozen=True)
class Device:
    name: str
    kind: str
    card: str
    """What VGS_DEVICE calls it."""

    @property
    def emulated(self) -> str:
        return f"{self.card}-emulated"

    @property
    def out(self) -> Path:
        return ROOT / ".verify" / self.name


DEVICES = {
    device.name: device for device in (Device("gaudi", "Gaudi", "hpu"), Device("ascend", "Ascend NPU", "ascend"))
}

CONFORMANCE = "conformance"
# What a device can get wrong. Left out: comparisons with upstream's CPU platform, laws that take thousands of steps
# and are computed by the same operations everywhere, and tests of the host's part alone.
TESTS = (
    CONFORMANCE,
    "test_startup",
    "test_contracts",
    "test_batching",
    "test_sampling_params",
    "test_draft_model",
    "test_speculation_oracle",
    "test_speculation_logprobs",
    "test_speculation_structured",
    "test_speculation_async",
    "test_serving",
)

NOT_COUNTED = "not counted on the device"


@dataclass(frozen=True)
class Check:
    title: str
    options: tuple[str, ...]


def speculative(**config: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


CHECKS = (
    Check("no speculation", ()),
    Check("ngram", speculative(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=4)),
    Check("draft_model", speculative(method="draft_model", model=str(DEMO_DRAFTER), num_speculative_tokens=3)),
)


@dataclass(frozen=True)
class Row:
    """A count on both devices; None: not counted there."""

    name: str
    card: float | None
    emulated: float | None
    must_agree: bool

    @property
    def conclusion(self) -> str:
        if self.card is None:
            return NOT_COUNTED
        if self.emulated is None:
            return "not counted on the emulated card"
        if self.card == self.emulated:
            return "equal"
        return "DIFFERENT" if self.must_agree else "different"


# ---- comparing ---------------------------------------------------------------------------------------------


def compare(card: dict[str, Any], emulated: dict[str, Any]) -> list[Row]:
    """Two results of graph-check. Numbers of steps and bytes may differ: another rounding is another token now and
    then. What warm-up makes and what comes after it may not."""
    pairs = (
        ("step signatures in warm-up", ("graphs", "signatures"), True),
        # The card may make helper programs of its own while weights are loaded.
        ("graphs compiled until ready", ("graphs", "compiles_until_ready"), False),
        ("graphs compiled after warm-up", ("phases", "mixed", "compiles"), True),
        ("graphs compiled after warm-up, prompt log-probabilities", (*_PROMPTS, "compiles"), True),
        ("CPU fallbacks", ("phases", "mixed", "fallbacks"), True),
        ("steps", ("phases", "mixed", "steps"), False),
        ("device-to-host syncs by the runner", ("phases", "mixed", "runner_syncs"), False),
        ("device-to-host syncs, all", ("phases", "mixed", "host_syncs"), False),
        ("KV bytes read", ("phases", "mixed", "kv_bytes_read"), False),
    )
    rows = [Row(name, _at(card, path), _at(emulated, path), must) for name, path, must in pairs]
    rates = (_syncs_per_step(card), _syncs_per_step(emulated))
    return [*rows, Row("device-to-host syncs of results per step", *rates, must_agree=True)]


_PROMPTS = ("phases", "prompt log-probabilities")


def _at(result: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = result
    for name in path:
        value = value[name]
    return value


def _syncs_per_step(result: dict[str, Any]) -> float:
    mixed = result["phases"]["mixed"]
    # Steps in which nobody samples read nothing, and their share moves with the number of steps.
    return float(round(mixed["runner_syncs"] / max(mixed["steps"], 1), 1))


def agrees(rows: Sequence[Row]) -> bool:
    return all(row.conclusion != "DIFFERENT" for row in rows)


# ---- writing -----------------------------------------------------------------------------------------------


def markdown(report: dict[str, Any]) -> str:
    """For the device's page in docs/."""
    lines = [f"## Verified on one {report['kind']}", ""]
    if report["rehearsal"]:
        lines = [f"## Rehearsal on the emulated card: says nothing about any {report['kind']}", ""]
    for command, findings in (("doctor", "findings"), ("selftest", "checks")):
        found = report[command]
        lines += [found, ""] if isinstance(found, str) else table(found[findings])
    if report["tests"]:
        lines += table(report["tests"])
    for check in report["checks"]:
        lines += [f"### graph-check, {check['title']}", ""]
        lines += [check["error"], ""] if check["error"] else table(check["rows"])
        for place, found in check["findings"].items():
            lines += [f"graph-check, {place}: {'; '.join(found) or 'clean'}", ""]
    return "\n".join([*lines, f"Result: {report['result']}", ""])


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each record, whose names are the header."""
    lines = [f"| {' | '.join(rows[0])} |", "| --- " * len(rows[0]) + "|"]
    lines += [f"| {' | '.join(map(cell, row.values()))} |" for row in rows]
    return [*lines, ""]


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if type(value) is int else str(value)


# ---- running -----------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, str]:
    """In one mode on the card and on the emulated one: the user's, else that of the card's torch."""
    lazy = not device_table.has_card("hpu") or gaudi_has_lazy_mode()
    found = {"PT_HPU_LAZY_MODE": str(int(lazy)), **os.environ, "VGS_DEVICE": device}
    if device.endswith("-emulated"):  # on a card's machine torch would open the card
        found["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return found


def run_logged(command: Sequence[str], device: str, log: Path) -> int:
    """Run a command on a device and return its exit status."""
    command = [sys.executable, "-m", *command]
    with log.open("w") as file:
        return subprocess.run(
            command, cwd=ROOT, env=environment(device), stdout=file, stderr=file, check=False
        ).returncode


def run_test(name: str, device: str, log: Path) -> dict[str, Any]:
    file = "tests/conformance" if name == CONFORMANCE else f"tests/full_tests/{name}.py"
    command = ["pytest", file, "-m", "not slow", "-q", f"--timeout={SECONDS_PER_FILE}"]
    started = time.monotonic()
    status = run_logged(command, device, log)
    # 5 is pytest's word for a file of which nothing was selected.
    result = {0: "passed", 5: "nothing to run"}.get(status, f"FAILED, status {status}")
    return {"test": name, "result": result, "seconds": round(time.monotonic() - started), "summary": last_line(log)}


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def run_command(name: str, device: str, stem: Path, *options: str) -> dict[str, Any] | str:
    """Return the JSON of one of gaudi-spec's commands, or why there is none."""
    file, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    file.unlink(missing_ok=True)
    status = run_logged(["vllm_gaudi_spec.tools.cli", name, *options, "--json", str(file)], device, log)
    if not file.exists():
        return f"{name} on {device} ended with status {status}: {last_line(log)}"
    return json.loads(file.read_text())


def run_check(check: Check, options: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for place, device in (("card", runs_on(options)), ("emulated card", options.device.emulated)):
        print(f"graph-check, {check.title}, on {device} in place of the {place}", flush=True)
        name = f"{check.title.replace(' ', '-')}-{place.replace(' ', '-')}"
        model = [options.model] if options.model else []
        stem = options.device.out / name
        result = run_command("graph-check", device, stem, *model, "--device", device, *check.options)
        if isinstance(result, str):
            return {"title": check.title, "error": result, "rows": [], "findings": {}, "good": False}
        results[place] = result
    rows = compare(results["card"], results["emulated card"])
    findings = {place: result["findings"] for place, result in results.items()}
    return {
        "title": check.title,
        "error": None,
        "rows": [{**asdict(row), "conclusion": row.conclusion} for row in rows],
        "findings": findings,
        "good": agrees(rows) and not any(findings.values()),
        "results": results,
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("device", choices=DEVICES, help="whose card")
    add("--rehearse", action="store_true", help="run everything on the emulated card, and say so in the report")
    add("--model", help="folder or Hugging Face id for graph-check (default: the demo model, with its drafter)")
    add("--tests", nargs="*", choices=TESTS, metavar="NAME", help="only these tests; none: no tests")
    titles = [check.title for check in CHECKS]
    add("--checks", nargs="*", choices=titles, metavar="TITLE", help=f"only these of {', '.join(titles)}")
    options = parser.parse_args()
    options.device = DEVICES[options.device]
    return options


def runs_on(options: argparse.Namespace) -> str:
    device: Device = options.device
    return device.emulated if options.rehearse else device.card


def what_is_missing(options: argparse.Namespace) -> str | None:
    device: Device = options.device
    if not options.rehearse and not device_table.has_card(device.card):
        return (
            f"there is no {device.kind} here: verify-{device.name} needs a card, its driver and the Python "
            f"of its vendor's image, which {sys.executable} may not be; ARGS=--rehearse runs it on the emulated card"
        )
    needed = ("vllm", *(("pytest", "pytest_timeout") if options.tests != [] else ()))
    if missing := [name for name in needed if find_spec(name) is None]:
        remedy = "install it, or run another Python"
        if "vllm" not in missing:  # pip's would be another's than the card's
            remedy = f"{sys.executable} -m pip install {' '.join(missing).replace('_', '-')}"
        return f"{sys.executable} has no {' and no '.join(missing)}; {remedy}"
    return None


def chosen_checks(options: argparse.Namespace) -> list[Check]:
    """The demo's drafter knows the vocabulary of the demo model only."""
    checks = [check for check in CHECKS if options.checks is None or check.title in options.checks]
    return [check for check in checks if not (options.model and check.title == "draft_model")]


def main() -> int:
    options = parse_options()
    if missing := what_is_missing(options):
        print(f"error: {missing}", file=sys.stderr)
        return 2
    device, out = options.device, options.device.out
    out.mkdir(parents=True, exist_ok=True)
    doctor = run_command("doctor", runs_on(options), out / "doctor")
    print(f"self-test on {runs_on(options)}", flush=True)
    self_test = run_command("selftest", runs_on(options), out / "selftest")
    tests = []
    for name in TESTS if options.tests is None else options.tests:
        print(f"{name} on {runs_on(options)}", flush=True)
        tests.append(run_test(name, runs_on(options), out / f"{name}.log"))
        print(f"  {tests[-1]['result']}: {tests[-1]['summary']}", flush=True)
    checks = [run_check(check, options) for check in chosen_checks(options)]
    good = not any(test["result"].startswith("FAILED") for test in tests) and all(check["good"] for check in checks)
    good = good and isinstance(self_test, dict) and self_test["passed"]
    report = {
        "kind": device.kind,
        "rehearsal": options.rehearse,
        "doctor": doctor,
        "selftest": self_test,
        "tests": tests,
        "checks": checks,
        "result": "all agree" if good else "see the lines marked failed, FAILED, DIFFERENT or not clean",
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    text = markdown(report)
    (out / "report.md").write_text(text)
    print(text)
    archive = shutil.make_archive(str(out), "gztar", root_dir=out.parent, base_dir=out.name)
    print(f"written: {out / 'report.json'} and report.md; all with logs to send: {archive}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
