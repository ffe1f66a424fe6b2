"""Run every test, a file at a time, and go on where an earlier run stopped: `make verify`.

Not among them are those below software of others, which is not installed for it: `make verify-vendor`, `make
verify-optimum`.

Each file is a pytest process of its own with its result in .verify/. A file that passed is not run again as
long as the checkout is what it was then; --fresh runs all of them. The files that failed are named at the end.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".verify"
SECONDS_PER_TEST = 3600
GAUDI, COMPILED, NPU = "hpu-emulated", "hpu-emulated, compiled", "ascend-emulated"
# The devices of full tests by their mark, and files that run on fewer of them: a mode and QUANT_CONFIG are a Gaudi's
# alone, and a card's memory is counted where it captures graphs.
DEVICES = {"emulated": (GAUDI, COMPILED, NPU), "ascend": (NPU,), "cuda": ("cuda",)}
ON_FEWER = {
    "test_emulated_compiled": (GAUDI,),
    "test_emulated_fp8": (GAUDI,),
    "test_emulated_memory": (GAUDI, NPU),
    "test_vendor_torch": (GAUDI,),
}
FOLDERS = {"emulated_cann": (NPU,)}
EMULATOR_TESTS = ROOT / "card_emulator" / "tests"
# Tests of these folders run beside other releases, in an environment of their own: see requirements/environment.py.
OTHER_RELEASES = {"integrations": "vllm-ascend"}


@dataclass(frozen=True)
class Job:
    """A file of tests, on the device that is chosen by itself or on one that it needs, with its mode."""

    file: Path
    device: str | None = None

    @property
    def name(self) -> str:
        return str(self.file.relative_to(ROOT)) + (f" on {self.device}" if self.device else "")

    @property
    def stem(self) -> Path:
        parts = self.file.relative_to(ROOT).with_suffix("").parts
        return STATE / "-".join((*parts, *([self.device.replace(", ", "-")] if self.device else [])))

    @property
    def other_release(self) -> str | None:
        return OTHER_RELEASES.get(self.file.parent.name)

    def environment(self) -> dict[str, str]:
        found = dict(os.environ)
        if self.other_release:  # whose platform it is, and which plugins there are, is what is tested there
            for name in ("VGS_DEVICE", "VLLM_PLUGINS"):
                found.pop(name, None)
            # Huawei's own torch_npu, for an engine over the emulated CANN, is installed beside this environment alone.
            found.setdefault("VGS_TORCH_NPU", str(Path(sys.prefix, "torch-npu")))
        if self.device:
            device, _, mode = self.device.partition(", ")
            found |= {"VGS_DEVICE": device, "PT_HPU_LAZY_MODE": "0" if mode else "1"}
        return found


def tree_hash() -> str:
    """One hash over names and contents of all that the outcome of a test can depend on, committed or not."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources() -> list[Path]:
    """Every file of the checkout: tests read pages, examples and the Makefile too. What git ignores is made of them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = b""
    found = {ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name}
    if ROOT / "pyproject.toml" not in found:  # an archive, by itself or in another project's folder that git ignores
        # Folders with a dot hold environments, caches and results.
        tops = [path for path in ROOT.iterdir() if path.is_file() or not path.name.startswith(".")]
        paths = [path for top in tops for path in (top, *top.rglob("*"))]
        found = {path for path in paths if "__pycache__" not in path.parts}
    return sorted(path for path in found if path.is_file())


def all_jobs() -> list[Job]:
    """Unit tests first: they are quick, and what they find explains what follows."""
    folders = [ROOT / "tests" / name for name in ("unit", *FOLDERS, *OTHER_RELEASES, "full_tests")]
    files = [file for folder in (EMULATOR_TESTS, *folders) for file in sorted(folder.rglob("test_*.py"))]
    return [Job(file, device) for file in files for device in devices(file)]


def devices(file: Path) -> tuple[str | None, ...]:
    if file.parent.name != "full_tests":
        return FOLDERS.get(file.parent.name, (None,))
    mark = re.search(rf"(?m)^pytestmark = .*\.({'|'.join(DEVICES)})\b", file.read_text())
    return ON_FEWER.get(file.stem, DEVICES[mark[1]] if mark else (None,))


def needs_gpu(file: Path) -> bool:
    """Whether all of a file's tests do."""
    return "\npytestmark = pytest.mark.cuda\n" in file.read_text()


def passed_earlier(job: Job, tree: str) -> bool:
    """Whether an earlier run of this very tree was good."""
    mark = job.stem.with_suffix(".passed")
    return mark.exists() and mark.read_text() == tree


def python_for(job: Job) -> str | None:
    """The Python that its tests run on; None if it cannot be had, of which the reason was printed."""
    what = job.other_release
    if what is None:
        return sys.executable
    folder = STATE / what
    make = [sys.executable, str(ROOT / "requirements" / "environment.py"), what, str(folder)]
    made = subprocess.run(make, cwd=ROOT, check=False).returncode == 0
    return str(folder / "bin" / "python") if made else None


def run(job: Job, tree: str) -> bool:
    python = python_for(job)
    if python is None:
        return False
    mark = job.stem.with_suffix(".passed")
    mark.unlink(missing_ok=True)
    command = [python, "-m", "pytest", str(job.file), f"--timeout={SECONDS_PER_TEST}"]
    passed = subprocess.run(command, cwd=ROOT, env=job.environment(), check=False).returncode == 0
    if passed:
        mark.write_text(tree)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="run all files, whatever passed earlier")
    parser.add_argument(
        "only", nargs="*", metavar="WORD", help="only files with one of these words in their path or device"
    )
    options = parser.parse_args()
    STATE.mkdir(exist_ok=True)
    tree = tree_hash()
    jobs = [job for job in all_jobs() if not options.only or any(word in job.name for word in options.only)]
    if not torch.cuda.is_available():
        for job in jobs:
            if needs_gpu(job.file):
                print(f"left out, as there is no GPU: {job.name}")
        jobs = [job for job in jobs if not needs_gpu(job.file)]
    if not jobs:
        print("error: no test file matches")
        return 2
    failed = []
    try:
        for number, job in enumerate(jobs, 1):
            print(f"[{number}/{len(jobs)}] {job.name}", flush=True)
            if not options.fresh and passed_earlier(job, tree):
                print("passed in an earlier run")
            elif not run(job, tree):
                failed.append(job)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here")
        return 130
    print(f"\n{len(jobs) - len(failed)} files passed, {len(failed)} failed", *(job.name for job in failed), sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
