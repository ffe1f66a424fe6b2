"""Makes the checkpoints, runs them on our platform and on upstream's, and compares: `make verify-models`.

python -m tests.models [NAME ...]

A name is one of the table, or begins some. The table goes to .verify/models/DEVICE.md, all that was found to
DEVICE.json, what each case printed to logs/. Exit status: 1 when a case of ours has a fault: a wrong answer, an error
after configuration that upstream does not end with, drafts that change the text, a finding of `gaudi-spec doctor` that
does not fit what happens, or memory written outside of the KV cache.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.models import checkpoints, comparison, vision
from tests.models.architectures import ARCHITECTURES, Recipe
from tests.models.formats import FORMAT_CASES

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".verify" / "models"
DEVICES = ("cpu", "hpu-emulated", "ascend-emulated")
UPSTREAM = "upstream"
CASES = ARCHITECTURES | FORMAT_CASES
VARIANTS = ("plain", "drafts", "doctor")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these, and those that begin so with a * at the end"
    )
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="ours (default: %(default)s)")
    parser.add_argument("--no-upstream", action="store_true", help="leave out upstream's CPU platform")
    parser.add_argument("--fresh", action="store_true", help="make every checkpoint anew, and ask upstream again")
    parser.add_argument("--list", action="store_true", help="only print the names")
    return parser.parse_args()


def chosen(names: list[str]) -> dict[str, Recipe]:
    if not names:
        return CASES
    found = {
        case: recipe
        for case, recipe in CASES.items()
        if any(case == name or (name.endswith("*") and case.startswith(name[:-1])) for name in names)
    }
    if missing := [name for name in names if name not in found and not name.endswith("*")]:
        sys.exit(f"error: no case named {', '.join(missing)}; --list prints them")
    return found


# ---- running ---------------------------------------------------------------------------------------------


def made(cases: dict[str, Recipe]) -> dict[str, Path]:
    folders = {}
    for number, (case, recipe) in enumerate(cases.items(), 1):
        is_new = not checkpoints.folder_of(case, recipe, STATE / "checkpoints").exists()
        folders[case] = checkpoints.make(case, recipe, STATE / "checkpoints")
        if is_new:
            print(f"made {number}/{len(cases)} {case}", flush=True)
    return folders


def environment(side: str) -> dict[str, str]:
    found = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(STATE / "vllm"),
        "HF_HUB_OFFLINE": "1",
    }
    found.setdefault("OMP_NUM_THREADS", "1")
    for name in ("VGS_DEVICE", "VLLM_PLUGINS", "QUANT_CONFIG"):
        found.pop(name, None)
    return found | ({"VLLM_PLUGINS": ""} if side == UPSTREAM else {"VGS_DEVICE": side, "PT_HPU_LAZY_MODE": "1"})


def jobs(side: str, cases: dict[str, Recipe], folders: dict[str, Path]) -> list[dict[str, Any]]:
    prompts = checkpoints.prompts()
    return [
        {
            "case": case,
            "variant": variant,
            "side": side,
            "folder": str(folders[case]),
            "engine": recipe.engine,
            "pooling": recipe.pooling,
            "prompts": prompts,
            "num_tokens": checkpoints.NUM_TOKENS,
            "torchvision": str(STATE / "torchvision") if recipe.vision else None,
        }
        for case, recipe in cases.items()
        for variant in (VARIANTS if side != UPSTREAM else VARIANTS[:1])
    ]


def probe(side: str, todo: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each job of one platform ended with. Those that need torchvision have a process without the others."""
    apart = [[job for job in todo if bool(job["torchvision"]) == needed] for needed in (False, True)]
    return [result for part in apart if part for result in probe_alike(side, part)]


def probe_alike(side: str, todo: list[dict[str, Any]]) -> list[dict[str, Any]]:
    question, answer = STATE / f"{side}.jobs", STATE / f"{side}.results"
    question.write_text("".join(json.dumps(job) + "\n" for job in todo))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.models.probe", str(question), str(answer)]
    subprocess.run(command, env=environment(side), cwd=ROOT, check=True)
    return [json.loads(line) for line in answer.read_text().splitlines()]


def upstream(cases: dict[str, Recipe], folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """By case. Kept beside the checkpoints: nothing of ours changes it."""
    source = (ROOT / "tests" / "models" / "probe.py").read_bytes() + importlib.metadata.version("vllm-cpu").encode()
    kept = {
        case: folder.parent / f"upstream-{hashlib.sha256(source).hexdigest()[:12]}.json"
        for case, folder in folders.items()
    }
    todo = [job for job in jobs(UPSTREAM, cases, folders) if not kept[job["case"]].exists()]
    for result in probe(UPSTREAM, todo):
        kept[result["case"]].write_text(json.dumps(result))
    return {case: json.loads(path.read_text()) for case, path in kept.items()}


def collect(device: str, cases: dict[str, Recipe], with_upstream: bool) -> list[comparison.Row]:
    if any(recipe.vision for recipe in cases.values()):
        vision.install(STATE / "torchvision")
    folders = made(cases)
    results: dict[str, dict[str, Any]] = {case: {} for case in cases}
    for result in probe(device, jobs(device, cases, folders)):
        results[result["case"]][result["variant"]] = result
    if with_upstream:
        for case, result in upstream(cases, folders).items():
            results[case][UPSTREAM] = result
    rows = [comparison.row(case, results[case], reference(folders[case]), cases[case].tolerance) for case in cases]
    everything = {row.case: asdict(row) | {"results": results[row.case]} for row in rows}
    (STATE / f"{device}.json").write_text(json.dumps(everything, indent=1))
    return rows


def reference(folder: Path) -> dict[str, Any] | None:
    path = folder / "reference.json"
    return json.loads(path.read_text()) if path.exists() else None


def show(rows: list[comparison.Row], device: str) -> None:
    print(" | ".join(comparison.COLUMNS))
    for row in rows:
        print(" | ".join(comparison.cells(row, limit=70)))
    print()
    for line in comparison.summary(rows):
        print(line)
    path = STATE / f"{device}.md"
    path.write_text(comparison.markdown(rows, f"Models on {device}"))
    print(f"\n{path.relative_to(ROOT)}", flush=True)


def main() -> int:
    options = parse_options()
    cases = chosen(options.names)
    if options.list:
        print("\n".join(cases))
        return 0
    if options.fresh:
        shutil.rmtree(STATE / "checkpoints", ignore_errors=True)
    STATE.mkdir(parents=True, exist_ok=True)
    rows = collect(options.device, cases, not options.no_upstream)
    show(rows, options.device)
    return 1 if any(row.faults for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
