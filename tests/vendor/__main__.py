"""Software that is known to run on Gaudis, on the emulated one: does the emulator take what cards take?

    make verify-vendor VENDOR=<checkout of vllm-gaudi at 091bbadd>
    make verify-optimum

The first runs vllm-gaudi's own tests of its operators as they are, then one workload through its worker and through
ours, plain and with n-gram drafts, with counts in .verify/vendor/vllm-gaudi.md. The second generates text by
optimum-habana, with HPU graphs and a static cache. Nothing of a checkout is changed: a copy is installed. Each has an
environment of its own under .venv, made on first use. Exit status: 1 when a test fails that is not in
tests/vendor/known.py, or one of those there passes; when texts of ours or of optimum-habana's are not transformers';
when our worker has more than 1.7 times the graphs of vllm-gaudi's, more compiled programs, more launches a step or more
bytes.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.shared.common import markdown, write_json
from tests.vendor import beside, environment, known
from tests.vendor.environment import OUT
from tests.vendor.workload import NUM_DRAFTS


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vendor", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="software", required=True)
    vllm_gaudi = commands.add_parser("vllm-gaudi")
    vllm_gaudi.add_argument("checkout", type=Path, help=f"of vllm-gaudi, at {known.VLLM_GAUDI}")
    vllm_gaudi.add_argument("--files", nargs="*", choices=known.FILES, metavar="FILE", help="only these of its tests")
    vllm_gaudi.add_argument("--json", type=Path, help="also write the counts of serving to this file")
    vllm_gaudi.add_argument("--no-serving", action="store_true", help="only its tests")
    commands.add_parser("optimum-habana")
    return parser.parse_args()


def check_release(checkout: Path) -> None:
    """Refuse a checkout other than the one whose failures are known, unchanged."""
    if not (checkout / "vllm_gaudi").is_dir():
        raise SystemExit(f"error: {checkout} holds no folder vllm_gaudi")
    wanted = known.VLLM_GAUDI
    command = ["git", "-C", str(checkout), "describe", "--tags", "--abbrev=8", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = done.stdout.strip() or " ".join(done.stderr.split())
    if found != wanted:
        raise SystemExit(f"error: {checkout} is {found}; git -C {checkout} checkout {wanted.rpartition('-g')[2]}")


def install(python: str, checkout: Path) -> Path:
    """A copy, so that nothing is written into the checkout."""
    copy = OUT / "vllm-gaudi"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--editable", str(copy)],
        env=os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": known.VLLM_GAUDI.split("-")[0]},
        check=True,
    )
    return copy


def side_by_side(python: str, variables: dict[str, str], json: Path | None) -> tuple[list[str], list[str]]:
    """Return the table and what is wrong."""
    checkpoint = OUT / "checkpoint"
    beside.make_checkpoint(checkpoint)
    # Without the self-test, whose graphs serve nobody.
    chosen = {"VGS_DEVICE": "hpu-emulated", "PT_HPU_LAZY_MODE": "1", "VGS_SELF_TEST": "0"}
    ours = os.environ | chosen | {"PYTHONPATH": str(environment.ROOT)}
    runs: dict[str, beside.Run] = {}
    wrong: list[str] = []
    for name, ngram in (("", False), (f", n-gram, k = {NUM_DRAFTS}", True)):
        for who, where, given in (("vllm-gaudi", python, variables), ("ours", sys.executable, ours)):
            print(f"serving: {who}{name}", flush=True)
            out = OUT / f"{who}{'-ngram' if ngram else ''}.json"
            try:
                runs[who + name] = beside.serve(where, checkpoint, out, given, ngram)
            except beside.Failed as error:
                wrong.append(f"{who}{name}: {error}")
        if {f"ours{name}", f"vllm-gaudi{name}"} <= set(runs):
            wrong += [f"ours{name}: {one}" for one in beside.behind(runs[f"ours{name}"], runs[f"vllm-gaudi{name}"])]
    agreed = {name: beside.agreement(checkpoint, run) for name, run in runs.items()}
    for name, (right, num, gap) in agreed.items():
        if name.startswith("ours") and right != num:
            wrong.append(f"{name}: {num - right} of {num} tokens are not those of transformers, by up to {gap:.2f}")
    found = beside.tabulate(runs, agreed)
    if json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=environment.ROOT, capture_output=True, text=True)
        command = f"make verify-vendor VENDOR=../vllm-gaudi ARGS='--files --json {json}'"
        write_json(
            json,
            {
                "title": f"vllm-gaudi {known.VLLM_GAUDI} and this project, serving one workload on one emulated card",
                "date": f"{date.today()}",
                "machine": "emulated Gaudi 2, lazy mode",
                "command": command,
                "program_at_commit": commit.stdout.strip()[:8],
                "tables": [found],
            },
        )
    return [*markdown(found["columns"], found["rows"]).splitlines(), "", found["conditions"]], wrong


def check_vllm_gaudi(
    checkout: Path, files: Sequence[str], serving: bool, json: Path | None
) -> tuple[list[str], list[str]]:
    """Lines of the report, and what is wrong."""
    check_release(checkout)
    python = environment.python_of("vllm-gaudi")
    copy = install(python, checkout)
    variables = environment.variables(environment.make_card(OUT / "card"))
    wrong = []
    for file in files:  # in a process each: what one leaves behind cannot fail another
        # Without a root directory, test ids would begin with the path of the copy.
        command = [python, "-m", "pytest", "-q", "-rfE", "--rootdir", ".", "-p", "no:cacheprovider", "-p", "known"]
        done = subprocess.run([*command, f"tests/unit_tests/{file}"], cwd=copy, env=variables, check=False)
        if done.returncode:
            wrong.append(f"{file}: pytest ended with {done.returncode}")
    lines: list[str] = []
    if serving:
        lines, faults = side_by_side(python, variables, json)
        wrong += faults
    return lines, wrong


def check_optimum_habana() -> tuple[list[str], list[str]]:
    python = environment.python_of("optimum-habana")
    checkpoint = OUT / "checkpoint"
    beside.make_checkpoint(checkpoint)
    try:
        report = beside.run_script(
            [python, "-P", str(environment.HERE / "text_generation.py"), str(checkpoint)],
            OUT / "optimum-habana.json",
            environment.variables(environment.make_card(OUT / "card")),
        )
    except beside.Failed as error:
        return [], [f"optimum-habana: {error}"]
    return judge_optimum_habana(report)


def judge_optimum_habana(report: beside.Run) -> tuple[list[str], list[str]]:
    counts = report["counts"]
    wrong = [
        f"optimum-habana: the {when} texts are not those of transformers"
        for when in ("first", "second")
        if report[when] != report["expected"]
    ]
    if not (report["graphs"] and counts["graph_replays"]):
        wrong.append("optimum-habana: no HPU graph was made and replayed")
    line = (
        f"optimum-habana: {len(report['expected'])} texts twice, {report['graphs']} graphs, {counts['graph_replays']} "
        f"replays, {counts['fallbacks']} CPU fallbacks, {counts['dynamic_ops']} dynamic shapes"
    )
    return [line], wrong


def main() -> int:
    options = parse_options()
    OUT.mkdir(parents=True, exist_ok=True)
    if options.software == "vllm-gaudi":
        files = known.FILES if options.files is None else options.files
        lines, wrong = check_vllm_gaudi(options.checkout, files, not options.no_serving, options.json)
    else:
        lines, wrong = check_optimum_habana()
    out = OUT / f"{options.software}.md"
    out.write_text("\n".join([*lines, "", *(f"- {one}" for one in wrong), ""]))
    print("\n".join([*lines, "", *wrong, f"written: {out}"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
