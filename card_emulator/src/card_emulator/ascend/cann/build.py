"""Compile the emulated CANN into the cache folder, once per version of its sources, torch and torch_npu.

One library contains all of the code. The libraries that torch_npu loads by name are empty and depend on that library.
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
# Libraries that torch_npu is linked with or opens on first use.
NAMES = (
    *("libascendcl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libhccl.so"),
    *("libacl_tdt_channel.so", "libruntime.so", "libopapi.so", "libnnopbase.so", "libatb.so"),
)
_SOURCES = Path(__file__).parent
# Optimization has no benefit: each of the many operators is one line that calls ATen, which is compiled.
_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-fvisibility=default", "-w")


def build(torch_npu: Path, cache: Path) -> Path:
    """Return the folder in `cache` with the compiled libraries. `torch_npu` is the folder with Huawei's package, which
    includes CANN's headers."""
    headers = torch_npu / "include"
    if not (headers / "acl" / "acl_rt.h").is_file():
        raise SetupError(
            f"{torch_npu} has no include/acl, so it is not torch_npu as Huawei publishes it; name another folder."
        )
    shared = [*sorted(_SOURCES.glob("*.h")), *sorted(headers.glob("acl/*.h"))]
    sources = {source: _hash([source, *shared]) for source in sorted(_SOURCES.glob("*.cpp"))}
    folder = cache / _hash([], *sources.values(), *NAMES)
    if folder.is_dir():
        return folder
    compiler = shutil.which("g++")
    if compiler is None:
        raise SetupError("the emulated CANN is compiled at first use and needs g++: apt install g++")
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
        # None of its symbols is used, but the dependency makes the loader find the library.
        to_all = ["-Wl,--no-as-needed", f"-L{to}", f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
        _run([compiler, "-shared", *to_all, f"-Wl,-soname,{name}", "-o", str(to / name)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        raise SetupError(
            "compiling the emulated CANN failed; it needs a g++ with C++20, and the headers of torch_npu 2.13.0:\n"
            + "\n".join(errors[:20] or [done.stderr[-2000:]])
        )
