"""Compile the emulated CANN into the cache folder, once for each version of its sources, torch and torch_npu.

All of the code is in one library. The libraries that torch_npu loads by name are empty and depend on that one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from card_emulator.errors import SetupError

LIBRARY = "libemulated_cann.so"
# The libraries of CANN that torch_npu is linked with or opens on first use.
NAMES = (
    *("libascendcl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libhccl.so"),
    *("libacl_tdt_channel.so", "libruntime.so", "libopapi.so", "libnnopbase.so", "libatb.so"),
)
_SOURCES = Path(__file__).parent
# Optimization has no benefit, because each operator only calls ATen, which is already compiled.
_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-fvisibility=default", "-w")


def build(torch_npu: Path, cache: Path) -> Path:
    """Compile the libraries if necessary, and return their folder in `cache`. CANN's headers are taken from Huawei's
    package in `torch_npu`."""
    headers = torch_npu / "include"
    if not (headers / "acl" / "acl_rt.h").is_file():
        raise SetupError(
            f"{torch_npu} has no include/acl, so it is not torch_npu as published by Huawei. Specify another folder."
        )
    shared = [*sorted(_SOURCES.glob("*.h")), *sorted(headers.glob("acl/*.h"))]
    sources = {source: _hash([source, *shared]) for source in sorted(_SOURCES.glob("*.cpp"))}
    folder = cache / _hash([], *sources.values(), *NAMES)
    if folder.is_dir():
        return folder
    compiler = shutil.which("g++")
    if compiler is None:
        raise SetupError("the emulated CANN is compiled on first use, which requires g++: apt install g++")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # all ranks start at the same time, but only one of them compiles
        if not folder.is_dir():
            _make(compiler, sources, headers, folder)
    return folder


def _make(compiler: str, sources: dict[Path, str], headers: Path, folder: Path) -> None:
    cache = folder.parent
    with tempfile.TemporaryDirectory(dir=cache) as name:
        made = Path(name)
        includes = [f"-I{path}" for path in (headers, headers / "third_party" / "acl" / "inc", *include_paths())]

        def compiled(source: Path) -> Path:
            object_file = cache / f"{source.stem}-{sources[source]}.o"
            if not object_file.is_file():
                target = made / f"{source.stem}.o"
                _run([compiler, *_FLAGS, *includes, "-c", str(source), "-o", str(target)])
                target.rename(object_file)
            return object_file

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        libraries = made / "libraries"
        libraries.mkdir()
        _link(compiler, objects, libraries)
        libraries.rename(folder)


def _hash(files: list[Path], *values: str) -> str:
    digest = hashlib.sha256(repr((torch.__version__, _FLAGS, values)).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _link(compiler: str, objects: list[Path], to: Path) -> None:
    torch_libraries = Path(torch.__file__).parent / "lib"
    linked = [f"-L{torch_libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_libraries}", "-Wl,-z,defs"]
    _run([compiler, "-shared", *map(str, objects), *linked, f"-Wl,-soname,{LIBRARY}", "-o", str(to / LIBRARY)])
    for name in NAMES:
        # Depend on the library although no symbol of it is used, so that the loader loads it.
        to_all = ["-Wl,--no-as-needed", f"-L{to}", f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
        _run([compiler, "-shared", *to_all, f"-Wl,-soname,{name}", "-o", str(to / name)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        raise SetupError(
            "compiling the emulated CANN failed; it requires a g++ that supports C++20 and torch_npu 2.13.0:\n"
            + "\n".join(errors[:20] or [done.stderr[-2000:]])
        )
