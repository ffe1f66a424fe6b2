"""Test another release of vLLM on the emulated Gaudi: `make verify-next VLLM=PATH`.

PATH is vLLM's source distribution, a folder with it unpacked, or a git checkout that has the tags of releases. Nothing
is built or installed: the sources come before the installed vLLM on the path, so they run without compiled parts, on
the installed torch. First it lists the names of vLLM that our modules import and the release no longer has, then it
imports all modules and runs the tests. Tests that fail are run again with the installed vLLM, because some tests are
for a CPU only.
"""

import ast
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_gaudi_spec import versions

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".verify" / "next"
# Not imported: what is for other devices and releases, and what importing a module imports anyway.
LEFT_OUT = {"__init__", "__main__", "ascend", "cpu", "cuda", "integrations"}
SUITES = {
    "unit tests": ("tests/unit", "not slow"),
    "conformance": ("tests/conformance", "not slow"),
    "full tests": ("tests/full_tests", "not slow and emulated"),
}


def used_names(source: str) -> Iterator[tuple[str, str]]:
    """Yield each module of vLLM and name that a source imports on the newest release (`if FROM_...:`)."""
    for statement in ast.parse(source).body:
        nodes = [*ast.walk(statement)]
        if isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("FROM_"):
            nodes = [node for child in statement.body for node in ast.walk(child)]
        elif any(isinstance(node, ast.Name) and node.id.startswith("FROM_") for node in nodes):
            continue
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


def has_name(site: Path, module: str, name: str) -> bool:
    """Whether a module of the release mentions a name, or is a package with a module of that name."""
    folder = site.joinpath(*module.split("."))
    if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
        return True
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return file.is_file() and re.search(rf"\b{re.escape(name)}\b|import \*", file.read_text()) is not None


def moved_names(site: Path, package: Path) -> Iterator[str]:
    """Yield the names that the release no longer has where we import them, with the modules that now define them."""
    for path in sorted(package.rglob("*.py")):
        for module, name in used_names(path.read_text()) if "integrations" not in path.parts else ():
            if not has_name(site, module, name):
                defined = re.compile(rf"(?m)^(?:class|def) {re.escape(name)}\b|^{re.escape(name)}\b.*=")
                files = (site / "vllm").rglob("*.py")
                now = [str(file.relative_to(site)) for file in files if defined.search(file.read_text())]
                yield f"{path.relative_to(package)}: {module}.{name} (now in {', '.join(now) or 'no module'})"


def lay_out(source: Path) -> tuple[Path, str]:
    """Return a folder with the release as if it were installed, and its version."""
    if source.is_file():
        with tarfile.open(source) as archive:
            archive.extractall(STATE, filter="data")
            source = STATE / archive.getnames()[0].split("/")[0]
    info = source / "PKG-INFO"
    if not (source / "vllm" / "__init__.py").is_file() or not (info.is_file() or (source / ".git").exists()):
        raise SystemExit(
            f"error: {source} is no source distribution or checkout of vLLM: it needs vllm/, and PKG-INFO or .git"
        )
    metadata = info.read_text() if info.is_file() else describe_checkout(source)
    version = re.findall(r"(?m)^Version: (\S+)", metadata)[0]
    site = STATE / f"site-{version}"
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(metadata)
    (site / "vllm").unlink(missing_ok=True)
    (site / "vllm").symlink_to((source / "vllm").resolve())
    return site, version


def describe_checkout(source: Path) -> str:
    """Return package metadata whose version is the newest tag before the commit (v0.33.1rc0-12-gabc: 0.33.1rc0)."""
    command = ["git", "-C", str(source), "describe", "--tags", "--match", "v[0-9]*"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.strip().removeprefix('v').split('-')[0]}\n"


def run_suite(name: str, folder: str, marks: str, release: dict[str, str], installed: dict[str, str]) -> bool:
    """Run tests with the release, and those that fail with the installed vLLM too, on the same device.

    Prints the tests that fail with the release only, and returns whether there are none. They include tests and modules
    that the installed vLLM skips or does not have.
    """
    title = name.replace(" ", "-")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", marks, folder]
    command += ["--continue-on-collection-errors", "-o", f"cache_dir={STATE / f'cache-{title}'}"]

    def run(label: str, environment: dict[str, str], *options: str) -> tuple[int, set[str]]:
        log = STATE / f"{title}-{label}.log"
        with log.open("w") as stream:
            done = subprocess.run(
                [*command, *options], cwd=ROOT, env=environment, stdout=stream, stderr=stream, check=False
            )
        lines = log.read_text().splitlines()
        print(f"{name}, {label}: {lines[-1]} ({log})")
        failed = (line.partition(" ") for line in lines if line.startswith(("FAILED ", "ERROR ")))
        return done.returncode, {rest.partition(" - ")[0] for _, _, rest in failed}

    status, failed = run("release", release, "--cache-clear")
    if status != pytest.ExitCode.TESTS_FAILED:
        return status == pytest.ExitCode.OK
    status, failed_before = run("installed", installed, "--last-failed")
    broken = sorted(failed - failed_before)
    for name in broken:
        print("  fails with the release only:", name)
    return status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not broken


def main() -> int:
    site, version = lay_out(Path(sys.argv[1]))
    package = ROOT / "vllm_gaudi_spec"
    moved = [*moved_names(site, package)]
    print(f"vLLM {version}: {len(moved)} names moved", *moved, sep="\n  ")
    if not version.startswith(tuple(f"{release}." for release in versions.VLLM)):
        print(f"error: add {version.rpartition('.')[0]} to VLLM in vllm_gaudi_spec/versions.py, then run the tests")
        return 1
    path = [str(site), str(ROOT), str(ROOT / "card_emulator" / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"VGS_DEVICE": "hpu-emulated", "PT_HPU_LAZY_MODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    modules = [file.relative_to(ROOT).with_suffix("").parts for file in sorted(package.rglob("*.py"))]
    imports = "; ".join(f"import {'.'.join(parts)}" for parts in modules if not {*parts} & LEFT_OUT)
    done = subprocess.run([sys.executable, "-c", imports], cwd=ROOT, env=environment, check=False)
    print("imports:", "failed" if done.returncode else "all modules")
    installed = environment | {"PYTHONPATH": os.pathsep.join(path[1:])}
    passed = [run_suite(name, *suite, environment, installed) for name, suite in SUITES.items()]
    return int(done.returncode != 0 or not all(passed))


if __name__ == "__main__":
    raise SystemExit(main())
