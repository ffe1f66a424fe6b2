"""Compile every graph of the warm-up on a machine without a card: `make verify-gaudi MODE=compile`.

    make verify-gaudi MODE=compile                                  in Intel's image, on any x86 machine with gcc
    make verify-gaudi MODE=compile ARGS="MODEL --max-num-seqs 32"   with options of `gaudi-spec graph-check`
    make verify-gaudi MODE=compile ARGS=--rehearse                  on the emulated card, where nothing is compiled

**This has never run in Intel's image.** Intel's bridge and graph compiler compile the graphs, above a library that is
loaded in place of libSynapse.so and stands in for the card: verify_compile.c. An engine starts and warms up. Nothing
that would run on the card is run, so this says nothing about results or speed, and only one rank is possible.

Prints the operators that fall back to the CPU, the graphs that fail, and the number, compile times and workspace sizes
of recipes. Writes all of that to .verify/compile/report.json, and the engine's output beside it to engine.log.

Exit status: 0 when every graph was compiled, 1 when not, 2 when something is missing or options make no sense.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.verify_device import ROOT, last_line
from vllm_gaudi_spec.config import GAUDI2, GAUDIS, format_size, in_one_line
from vllm_gaudi_spec.tools import graph_check
from vllm_gaudi_spec.tools.cli import make_parser

if TYPE_CHECKING:
    from vllm_gaudi_spec.graphs import Job
    from vllm_gaudi_spec.runner.model_runner import ModelRunner

SOURCE = Path(__file__).with_suffix(".c")
NAME = "libSynapse.so"
INSTALLED = Path("/usr/lib/habanalabs", NAME)
OUT = ROOT / ".verify" / "compile"
NUM_SHOWN = 5


class Recipe(NamedTuple):
    """A graph that the graph compiler was given, as verify_compile.c writes it down."""

    status: int
    microseconds: int
    workspace: int
    name: str


def build(real: Path, folder: Path) -> Path:
    """Build the library to load in place of `real`, to which it forwards what it does not define."""
    folder.mkdir(parents=True, exist_ok=True)
    path, library, stub = str(real.absolute()), folder / NAME, folder / "original.so"
    gcc = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    # A library is found again under the name that it gives itself, and the original's is this library's own. An empty
    # library named by the original's path takes its place while linking, so that the loader opens that path.
    subprocess.run([*gcc, "-x", "c", os.devnull, f"-Wl,-soname,{path}", "-o", str(stub)], check=True)
    forwards = ["-Wl,--no-as-needed", str(stub), f"-Wl,-soname,{NAME}"]
    subprocess.run([*gcc, str(SOURCE), f'-DREAL_LIBRARY="{path}"', *forwards, "-o", str(library)], check=True)
    return library


def read_recipes(log: Path) -> list[Recipe] | None:
    """Return the graphs compiled so far, or None if the library that writes the log was not loaded."""
    if not log.exists():
        return None
    lines = [line.split("\t", 4) for line in log.read_text().splitlines()]
    return [Recipe(int(line[1]), int(line[2]), int(line[3]), line[4]) for line in lines if line[0] == "compile"]


# ---- in the engine's process -------------------------------------------------------------------------------


class Attempts:
    """Runs warm-up jobs, and continues after one that fails."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def wrap(self, jobs: Callable[["ModelRunner"], Iterator["Job"]]) -> Callable[["ModelRunner"], Iterator["Job"]]:
        def wrapped(runner: "ModelRunner") -> Iterator["Job"]:
            for job in jobs(runner):
                yield job._replace(run=partial(self._run, job, runner.backend.memory.synchronize))

        return wrapped

    def _run(self, job: "Job", wait: Callable[[], None]) -> None:
        self.runs[job.kind] += 1
        try:
            job.run()
            wait()  # the bridge may compile in a thread of its own
        except Exception as error:
            signatures = [str(signature) for signature in job.signatures]
            self.failures.append({"kind": job.kind, "signatures": signatures, "error": in_one_line(error)})


def start_engine(arguments: list[str]) -> dict[str, Any]:
    from vllm_gaudi_spec.runner import profile, warmup
    from vllm_gaudi_spec.tools.graph_check import engine

    attempts = Attempts()
    warmup.jobs = profile.jobs = attempts.wrap(warmup.jobs)
    found: dict[str, Any] = {"error": None, "fallbacks": {}}
    try:
        llm = engine.open_engine(make_parser().parse_args(arguments))
        device = engine.read_report(llm)["device"]
        found["fallbacks"] = device.get("cpu_fallback", {}).get("FallbackOps", {})
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {in_one_line(error)}"
    return found | {"runs": dict(attempts.runs), "failures": attempts.failures}


# ---- the report --------------------------------------------------------------------------------------------


def find_faults(engine: dict[str, Any], recipes: list[Recipe] | None, *, rehearsal: bool) -> list[str]:
    faults = [f"the engine did not start: {engine['error']}"] if engine["error"] else []
    failed = [f"failed: {job['kind']} {'; '.join(job['signatures'])}: {job['error']}" for job in engine["failures"]]
    faults += dict.fromkeys(failed)  # the profile run and warm-up may run the same job
    if rehearsal:
        return faults
    if recipes is None:
        return [*faults, f"the bridge did not load the library that replaces {NAME}, so nothing was compiled by it"]
    faults += [f"not compiled: {recipe.name}, status {recipe.status}" for recipe in recipes if recipe.status]
    return faults if recipes else [*faults, "no graph was compiled"]


def describe(engine: dict[str, Any], recipes: list[Recipe], faults: list[str]) -> str:
    made = [recipe for recipe in recipes if not recipe.status]
    seconds = sum(recipe.microseconds for recipe in recipes) / 1e6
    lines = [
        f"jobs run: {', '.join(f'{count} {kind}' for kind, count in engine['runs'].items()) or 'none'}",
        f"recipes: {len(made)} compiled, {len(recipes) - len(made)} failed, {seconds:,.1f} s",
    ]
    slowest = sorted(made, key=lambda recipe: -recipe.microseconds)[:NUM_SHOWN]
    largest = sorted(made, key=lambda recipe: -recipe.workspace)[:NUM_SHOWN]
    lines += [f"compiled longest: {recipe.microseconds / 1e6:,.2f} s, {recipe.name}" for recipe in slowest]
    lines += [f"largest workspace: {format_size(recipe.workspace)}, {recipe.name}" for recipe in largest]
    fallbacks = [f"{name} x {count}" for name, count in engine["fallbacks"].items()]
    lines += [f"falls back to the CPU: {', '.join(fallbacks) or 'nothing'}", *faults]
    return "\n".join([*lines, "see the lines above" if faults else "nothing failed"])


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Return our options, and those of graph-check."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("--library", type=Path, default=INSTALLED, metavar="FILE", help=f"Intel's {NAME} (default: {INSTALLED})")
    add("--card", choices=GAUDIS, default=GAUDI2, help=f"the card to compile for (default: {GAUDI2})")
    add("--rehearse", action="store_true", help="start the engine on the emulated card, which compiles nothing")
    add("--inside", type=Path, help=argparse.SUPPRESS)  # in the engine's process: the file for what it found
    return parser.parse_known_args()


def find_mistake(options: argparse.Namespace) -> str | None:
    if options.rehearse:
        return None
    if not options.library.exists():
        return f"there is no {options.library}: run this in Intel's image, or pass --library; --rehearse needs neither"
    return None if shutil.which("gcc") else "there is no gcc here, which builds the library that replaces Intel's"


def main() -> int:
    options, arguments = parse_options()
    if options.inside:
        options.inside.write_text(json.dumps(start_engine(arguments)))
        return 0
    device = "hpu-emulated" if options.rehearse else "hpu"
    arguments = ["graph-check", *arguments, "--device", device]
    checked = make_parser().parse_args(arguments)
    if mistake := find_mistake(options) or graph_check.find_mistake(checked):
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    recipe_log, engine_log, result = OUT / "recipes.tsv", OUT / "engine.log", OUT / "engine.json"
    variables = {**os.environ, **graph_check.set_environment(checked)}
    variables.pop("PT_HPU_RECIPE_CACHE_CONFIG", None)  # a recipe from a cache is not compiled
    if not options.rehearse:
        folder = str(build(options.library, OUT / "library").parent)
        variables["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".removesuffix(":")
        variables |= {"COMPILE_ONLY_CARD": options.card, "COMPILE_ONLY_LOG": str(recipe_log)}
    print(f"starting an engine on {device}; its output is in {engine_log}", flush=True)
    command = [sys.executable, "-m", "tests.verify_compile", "--inside", str(result), *arguments]
    with engine_log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=file, stderr=file, check=False)
    engine: dict[str, Any] = {"runs": {}, "failures": [], "fallbacks": {}}
    engine["error"] = f"status {done.returncode}: {last_line(engine_log)}"
    if result.exists():
        engine = json.loads(result.read_text())
    recipes = read_recipes(recipe_log)
    faults = find_faults(engine, recipes, rehearsal=options.rehearse)
    found = [recipe._asdict() for recipe in recipes or ()]
    report = {"card": options.card, "rehearsal": options.rehearse, **engine, "recipes": found, "faults": faults}
    (OUT / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(describe(engine, recipes or [], faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
