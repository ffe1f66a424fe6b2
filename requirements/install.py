"""Install a lock into the running environment, with progress: what `make setup` does after it made .venv.

python requirements/install.py cpu    torch, the CPU stack, the name vllm for it, and this project
python requirements/install.py dev    what the tests and the linters need on top
python requirements/install.py card   what vLLM needs beside a card's torch, vLLM without kernels, and this project
python requirements/install.py ascend    torch and torch_npu before that, for an image with CANN alone
python requirements/install.py kubernetes    the schemas of Kubernetes
python requirements/install.py docs   what makes the site of docs/
python requirements/install.py vllm-gaudi     the vLLM of the vllm-gaudi that `make verify-vendor` is given
python requirements/install.py optimum-habana    optimum-habana with its transformers, for `make verify-optimum`
python requirements/install.py vllm-ascend    vllm-ascend as far as it runs without an NPU, its vLLM and this project

Only the standard library is used. An interrupted run leaves `.installing` in the environment, because pip
takes a half-unpacked package for an installed one: after `cpu` the Makefile then starts afresh, `dev` unpacks
its few packages again.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
EMULATOR = HERE.parent / "card_emulator"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
REPORT_SECONDS = 5.0
BESIDE_THE_CARD = ("vllm-gaudi", "optimum-habana")


class Progress:
    """Turns pip's output into one short line every few seconds."""

    def __init__(self, title: str, expected: int) -> None:
        print(title, flush=True)
        self.expected = expected
        self.fetched = 0
        self.to_install = 0
        self.doing = "starting pip"
        self.started = time.monotonic()
        self.site = Path(sysconfig.get_paths()["purelib"])
        self.packages_before = 0

    def read(self, line: str) -> None:
        words = line.split()
        if line.startswith(("Collecting", "Requirement already satisfied", "Ignoring")):
            self.fetched += 1
            self.doing = f"{self.fetched} of {self.expected} found"
        elif words[:1] == ["Downloading"] and len(words) > 1:
            self.doing = f"{self.fetched} of {self.expected} found, downloading {words[1].split('/')[-1]}"
        elif line.startswith("Installing collected packages:"):
            self.to_install = len(words) - 3
            self.packages_before = self.packages_now()

    def packages_now(self) -> int:
        return sum(1 for _ in self.site.glob("*.dist-info"))

    def show(self) -> None:
        if self.to_install:
            installed = min(max(self.packages_now() - self.packages_before, 0), self.to_install)
            self.doing = f"{installed} of {self.to_install} installed"
        print(f"      {time.monotonic() - self.started:4.0f} s  {self.doing}", flush=True)

    def done(self) -> None:
        print(f"      {time.monotonic() - self.started:4.0f} s  done", flush=True)


def pip(progress: Progress, *arguments: str, **environment: str) -> list[str]:
    """Run pip; returns its output when it succeeded, raises CalledProcessError with it when it did not."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
    ]
    process = subprocess.Popen(
        [*command, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: list[str] = []

    def read_all() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            progress.read(line)

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    while reader.is_alive():
        reader.join(REPORT_SECONDS)
        if reader.is_alive():
            progress.show()
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, "pip install", output="\n".join(lines))
    return lines


def install_torch(step: str) -> None:
    """The CPU build of torch: from the configured indexes if they have it, else from PyTorch's own. The same files
    either way: their hashes are locked."""
    progress = Progress(f"{step} requirements/torch.txt: torch's CPU build", expected=1)
    lock = str(HERE / "torch.txt")
    try:
        pip(progress, "--require-hashes", "-r", lock)
    except subprocess.CalledProcessError as error:
        if "No matching distribution" not in error.output:
            raise
        print(f"      not on the configured indexes, adding {TORCH_INDEX} (set PIP_EXTRA_INDEX_URL for a mirror)")
        pip(progress, "--require-hashes", "-r", lock, "--extra-index-url", TORCH_INDEX)
    progress.done()


def install_lock(title: str, name: str, *options: str) -> None:
    lock = HERE / f"{name}.txt"
    expected = len(re.findall(r"(?m)^[A-Za-z0-9._-]+==", lock.read_text()))
    progress = Progress(title, expected)
    pip(progress, "--require-hashes", "-r", str(lock), *options)
    progress.done()


def install_project(title: str, *others: Path) -> None:
    """`others`: packages of the checkout that are installed along with it."""
    folders = [HERE.parent, *others]
    progress = Progress(title, expected=len(folders))
    pip(progress, "--no-build-isolation", *(f"--editable={folder}" for folder in folders))
    progress.done()


def install_cpu() -> None:
    install_torch("[2/4]")
    install_lock("[3/4] requirements/cpu.txt: vLLM's CPU build and what it needs", "cpu")
    install_project("[4/4] this project, its emulated cards, and the name vllm", EMULATOR, HERE / "vllm-name")


# vLLM's Python code without kernels, under the version that was asked for, without "+empty" after it.
CARD_BUILD = {"VLLM_TARGET_DEVICE": "empty", "VLLM_SKIP_VERSION_SUFFIX": "1"}


def install_card(done: int = 0) -> None:
    """On top of a vendor's image, whose torch no lock names. vLLM's setup reads the version of that torch, so its build
    has to see it. `done`: steps before this."""
    steps = [f"[{done + step}/{done + 4}]" for step in range(1, 5)]
    install_lock(f"{steps[0]} requirements/card.txt: what vLLM needs", "card")
    with tempfile.TemporaryDirectory() as tools:
        install_lock(f"{steps[1]} requirements/card-build.txt: what builds vLLM", "card-build", "--target", tools)
        progress = Progress(f"{steps[2]} requirements/card-source.txt: vLLM without kernels", expected=1)
        source = HERE / "card-source.txt"
        options = ("--no-build-isolation", "--no-binary", "vllm", "-r", str(source))
        # Before what the image has there, which its torch may need.
        paths = os.pathsep.join(filter(None, (tools, os.environ.get("PYTHONPATH"))))
        pip(progress, "--require-hashes", *options, PYTHONPATH=paths, **CARD_BUILD)
        progress.done()
    install_project(f"{steps[3]} this project and its emulated cards", EMULATOR)


def install_ascend() -> None:
    """Into an image with CANN alone."""
    install_torch("[1/6]")
    install_lock("[2/6] requirements/torch-npu.txt: Huawei's torch_npu", "torch-npu")
    install_card(done=2)


# What its build asks for: which card, and not to compile for it.
ASCEND_BUILD = {"SOC_VERSION": "ascend910b1", "COMPILE_CUSTOM_KERNELS": "0"}


def install_vllm_ascend() -> None:
    install_torch("[1/4]")
    install_lock(
        "[2/4] requirements/vllm-ascend.txt: vLLM's CPU build of that release and what both need", "vllm-ascend"
    )
    progress = Progress("[3/4] requirements/vllm-ascend-source.txt: vllm-ascend", expected=1)
    source = HERE / "vllm-ascend-source.txt"
    pip(progress, "--require-hashes", "--no-build-isolation", "-r", str(source), **ASCEND_BUILD)
    progress.done()
    install_project("[4/4] this project, and its emulated cards", EMULATOR)


def install_beside_the_card(name: str) -> None:
    """For software that finds the emulated Gaudi by PYTHONPATH; see tests/vendor/environment.py."""
    install_torch("[1/2]")
    install_lock(f"[2/2] requirements/{name}.txt: what runs on the emulated Gaudi", name)


def install_dev(interrupted: bool) -> None:
    options = ["--ignore-installed"] if interrupted else []
    install_lock("[1/3] requirements/dev.txt: tests and linters", "dev", *options)
    # The first is for tests of multimodal models alone (tests/models/vision.py), the second for the emulated NPU: where
    # it is installed, `import torch` opens it, and fails without a card's software.
    for step, name in (("[2/3]", "torchvision"), ("[3/3]", "torch-npu")):
        folder = str(Path(sys.prefix) / name)
        install_lock(f"{step} requirements/{name}.txt, in a folder of its own", name, "--upgrade", "--target", folder)


def install_kubernetes() -> None:
    install_lock("[1/1] requirements/kubernetes.txt: the schemas of Kubernetes", "kubernetes")


def install_docs() -> None:
    install_lock("[1/1] requirements/docs.txt: what makes the site of docs/", "docs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    environments = ["cpu", "card", "ascend", "dev", "docs", "kubernetes", "vllm-ascend", *BESIDE_THE_CARD]
    parser.add_argument("what", choices=environments)
    what = parser.parse_args().what
    if sys.prefix == sys.base_prefix:
        print("error: run this with the Python of a virtual environment (`make setup` does)")
        return 2
    marker = Path(sys.prefix) / ".installing"
    interrupted = marker.exists()
    marker.touch()
    try:
        if what == "cpu":
            install_cpu()
        elif what == "card":
            install_card()
        elif what == "ascend":
            install_ascend()
        elif what == "dev":
            install_dev(interrupted)
        elif what == "kubernetes":
            install_kubernetes()
        elif what == "docs":
            install_docs()
        elif what in BESIDE_THE_CARD:
            install_beside_the_card(what)
        else:
            install_vllm_ascend()
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue")
        return 130
    except subprocess.CalledProcessError as error:
        print("\n".join(error.output.splitlines()[-25:]))
        print(f"error: pip failed (exit {error.returncode}); its last lines are above. Fix that and run this again.")
        return 1
    marker.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
