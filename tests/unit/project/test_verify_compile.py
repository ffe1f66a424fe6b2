"""The library that `make verify-gaudi MODE=compile` loads in place of libSynapse.so, above a stand-in for the original.

The stand-in counts its calls. It has a function that nobody knows, one of hccl, and one of each kind that must not be
reached. The library is opened as Intel's bridge opens it: by name, with functions looked up in that handle.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from ctypes import byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests import verify_compile
from tests.verify_compile import NAME, ROOT, SOURCE, Attempts, Recipe, build, describe, find_faults, read_recipes
from vllm_gaudi_spec.graphs import Job

SUCCESS, INVALID, NO_MEMORY, NO_DEVICE, UNSUPPORTED, FAILED = 0, 1, 4, 8, 18, 26
GAUDI2, GAUDI3 = 4, 5
TO_DEVICE, TO_HOST = 0, 1
ALIGNMENT = 11
GIB = 2**30

REAL = """
#include <stdint.h>
#include <string.h>
static int calls;
int count_calls(void) { return calls; }
int synInitialize(void) { calls++; return 0; }
int synTensorCreate(void) { calls++; return 0; }
int synFunctionOfALaterRelease(int x) { calls++; return x + 1; }
int hcclGetVersion(int *version) { calls++; *version = 7; return 0; }
int synGraphCompile(void **recipe, void *graph, const char *name, const char *log) {
    calls++;
    if (!strcmp(name, "wrong")) return 26;
    *recipe = graph;
    return 0;
}
int synWorkspaceGetSize(uint64_t *size, void *recipe) { *size = 1000 + (uintptr_t)recipe; return 0; }
int synDeviceTypeGetAttribute(uint64_t *values, const int *attributes, unsigned count, int type) {
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i] == 8) return 18;
        values[i] = attributes[i] * 10 + type;
    }
    return 0;
}
"""
REPLACED = sorted({*re.findall(r"^int (syn\w+)", SOURCE.read_text(), re.MULTILINE)} - {"synGraphCompile"})

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc builds both libraries")


class Loaded(NamedTuple):
    handle: ctypes.CDLL
    log: Path

    def __call__(self, name: str, *arguments: Any) -> int:
        function = getattr(self.handle, name)
        return int(function(*arguments))

    @property
    def calls_of_the_original(self) -> int:
        return self("count_calls")


def build_both(folder: Path) -> Path:
    """Return the library, in a folder of its own beside the stand-in's."""
    source, real = folder / "real.c", folder / "real" / NAME
    real.parent.mkdir()
    source.write_text(REAL + "".join(f"int {name}(void) {{ calls++; return 99; }}\n" for name in REPLACED))
    # The original's own name for itself is the one by which the bridge opens it.
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), f"-Wl,-soname,{NAME}", "-o", str(real)], check=True)
    return build(real, folder / "library")


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    log = tmp_path / "recipes.tsv"
    monkeypatch.setenv("COMPILE_ONLY_LOG", str(log))
    monkeypatch.delenv("COMPILE_ONLY_CARD", raising=False)
    return Loaded(ctypes.CDLL(str(build_both(tmp_path)), mode=os.RTLD_LOCAL | os.RTLD_NOW), log)


def test_bridge_finds_every_function_where_it_looks(tmp_path: Path) -> None:
    """In a process of its own, since the loader reads LD_LIBRARY_PATH when a process starts. The original is on it too,
    and a library that was linked against the original gets the replaced functions."""
    library = build_both(tmp_path)
    user, source = tmp_path / "libuser.so", tmp_path / "user.c"
    source.write_text("int synStreamQuery(void *); int query(void) { return synStreamQuery(0); }")
    real = tmp_path / "real" / NAME
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), str(real), "-o", str(user)], check=True)
    script = f"""if True:
        import ctypes, json, os
        handle = ctypes.CDLL("{NAME}", mode=os.RTLD_LOCAL | os.RTLD_NOW)
        names = {[*REPLACED, "synGraphCompile", "synTensorCreate", "synFunctionOfALaterRelease", "hcclGetVersion"]}
        found = [name for name in names if hasattr(handle, name)]
        linked = ctypes.CDLL("{user}").query()
        print(json.dumps([found == names, handle.synFunctionOfALaterRelease(1), linked, hasattr(handle, "synNone")]))
    """
    path = f"{library.parent}:{real.parent}"
    done = subprocess.run(
        [sys.executable, "-c", script], env={"LD_LIBRARY_PATH": path}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [True, 2, SUCCESS, False]


def test_other_functions_reach_the_original(loaded: Loaded) -> None:
    version = c_int()
    assert loaded("synInitialize") == loaded("synTensorCreate") == loaded("hcclGetVersion", byref(version)) == SUCCESS
    assert version.value == 7
    assert loaded("synFunctionOfALaterRelease", 4) == 5
    assert loaded.calls_of_the_original == 4


def test_there_is_one_card_of_the_chosen_kind(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    count, device, name, affinity = c_uint32(), c_uint32(9), ctypes.create_string_buffer(16), c_uint64()
    for card, kind, other in (("gaudi2", GAUDI2, GAUDI3), ("gaudi3", GAUDI3, GAUDI2)):
        monkeypatch.setenv("COMPILE_ONLY_CARD", card)
        assert loaded("synDeviceGetCount", byref(count)) == SUCCESS
        assert count.value == 1
        assert loaded("synDeviceGetCountByDeviceType", byref(count), other) == SUCCESS
        assert count.value == 0
        assert loaded("synDeviceAcquireByDeviceType", byref(device), other) == NO_DEVICE
        assert loaded("synDeviceAcquireByDeviceType", byref(device), kind) == SUCCESS
        assert loaded("synDeviceAcquireByModuleId", byref(device), 3) == SUCCESS
        assert loaded("synDeviceGetName", name, 16, device) == SUCCESS
        assert name.value.decode() == card.upper()
    assert loaded("synDeviceGetNextStreamAffinity", device, byref(affinity)) == SUCCESS
    assert loaded("synDriverGetVersion", name, 16) == loaded("synDeviceRelease", device) == SUCCESS
    assert loaded.calls_of_the_original == 0


def test_attributes_are_those_of_the_kind_of_card(loaded: Loaded) -> None:
    values, wanted = (c_uint64 * 3)(), (c_int * 3)(3, ALIGNMENT, 4)
    assert loaded("synDeviceGetAttribute", values, wanted, 3, 0) == SUCCESS
    assert list(values) == [96 * GIB, 10 * ALIGNMENT + GAUDI2, 96 * GIB]
    clock = (c_int * 1)(8)
    assert loaded("synDeviceGetAttribute", values, clock, 1, 0) == UNSUPPORTED


def test_device_is_described_in_both_structures(loaded: Loaded) -> None:
    class Info(ctypes.Structure):
        _fields_ = [
            *((name, c_uint64) for name in ("sram_base", "dram_base")),
            ("sram_size", c_uint32),
            *((name, c_uint64) for name in ("dram_size", "tpc_mask")),
            ("has_dram", ctypes.c_uint8),
            *((name, c_uint32) for name in ("id", "file")),
            ("type", c_int),
            ("index", ctypes.c_uint8),
            ("reserved", c_uint64),
        ]

    old, new = Info(index=77, reserved=77), Info(index=77, reserved=77)
    assert loaded("synDeviceGetInfo", 0, byref(old)) == loaded("synDeviceGetInfoV2", 0, byref(new)) == SUCCESS
    for info in (old, new):
        assert (info.dram_base, info.dram_size, info.tpc_mask) == (10 + GAUDI2, 96 * GIB, 50 + GAUDI2)
        assert (info.has_dram, info.id, info.type) == (1, 0, GAUDI2)
    assert (old.index, old.reserved, new.index, new.reserved) == (77, 77, 0, 0)


def test_device_addresses_are_distinct_and_never_followed(loaded: Loaded) -> None:
    blocks: list[tuple[int, int]] = []
    for size in (1, 0, 4096, 2**30, 123_457):
        address = c_uint64()
        assert loaded("synDeviceMalloc", 0, c_uint64(size), c_uint64(0), 0, byref(address)) == SUCCESS
        assert all(address.value >= start + length for start, length in blocks)
        assert 2**47 <= address.value < 2**64 - 2**47  # no process of an x86 host has memory there
        blocks.append((address.value, max(size, 1)))
        host = ctypes.create_string_buffer(b"x" * 8)
        pointer = c_uint64(ctypes.addressof(host))
        assert loaded("synMemCopyAsync", None, pointer, c_uint64(8), address, TO_DEVICE) == SUCCESS
        assert host.raw[:8] == b"x" * 8
        assert loaded("synMemCopyAsync", None, address, c_uint64(4), pointer, TO_HOST) == SUCCESS
        assert host.raw[:8] == bytes(4) + b"x" * 4
        for fill in ("synMemsetD8Async", "synMemsetD16Async", "synMemsetD32Async"):
            assert loaded(fill, address, 1, c_uint64(8), None) == SUCCESS
    assert loaded.calls_of_the_original == 0


def test_several_copies_to_the_host_are_zeros(loaded: Loaded) -> None:
    hosts = [ctypes.create_string_buffer(b"x" * 8) for _ in range(2)]
    sources, sizes = (c_uint64 * 2)(1, 2), (c_uint64 * 2)(8, 3)
    targets = (c_uint64 * 2)(*map(ctypes.addressof, hosts))
    assert loaded("synMemCopyAsyncMultiple", None, sources, sizes, targets, TO_HOST, c_uint64(2)) == SUCCESS
    assert [host.raw[:8] for host in hosts] == [bytes(8), bytes(3) + b"x" * 5]


def test_memory_is_that_of_a_card(loaded: Loaded) -> None:
    free, total, address = c_uint64(), c_uint64(), c_uint64()

    def measure() -> tuple[int, int]:
        assert loaded("synDeviceGetMemoryInfo", 0, byref(free), byref(total)) == SUCCESS
        return free.value // GIB, total.value // GIB

    assert measure() == (96, 96)
    assert loaded("synDeviceMalloc", 0, c_uint64(90 * GIB), c_uint64(0), 0, byref(address)) == SUCCESS
    assert measure() == (6, 96)
    assert loaded("synDeviceMalloc", 0, c_uint64(7 * GIB), c_uint64(0), 0, byref(c_uint64())) == NO_MEMORY
    assert loaded("synDeviceFree", 0, address, 0) == SUCCESS
    assert measure() == (96, 96)
    assert loaded("synDeviceFree", 0, address, 0) == INVALID


def test_host_memory_is_real(loaded: Loaded) -> None:
    pointer = c_void_p()
    assert loaded("synHostMalloc", 0, c_uint64(100), 0, byref(pointer)) == SUCCESS
    assert pointer.value
    assert pointer.value % 4096 == 0
    ctypes.memset(pointer.value, 1, 100)
    assert loaded("synHostMap", 0, c_uint64(100), pointer) == loaded("synHostUnmap", 0, pointer) == SUCCESS
    assert loaded("synHostFree", 0, pointer, 0) == SUCCESS
    assert loaded.calls_of_the_original == 0


def test_streams_events_and_launches_complete_at_once(loaded: Loaded) -> None:
    streams, events = [c_void_p() for _ in range(2)], [c_void_p() for _ in range(3)]
    assert not any(loaded("synStreamCreateGeneric", byref(stream), 0, 0) for stream in streams)
    assert not any(loaded("synEventCreate", byref(event), 0, 1) for event in events)
    made = [handle.value for handle in streams + events]
    assert all(made)
    assert len(set(made)) == len(made)
    nanoseconds = c_uint64()
    done = [
        loaded("synStreamSetAffinity", 0, streams[0], c_uint64(1)),
        loaded("synLaunch", streams[0], None, 0, c_uint64(0), None, 0),
        loaded("synLaunchWithExternalEvents", streams[0], None, 0, c_uint64(0), None, byref(events[2]), 1, 0),
        loaded("synEventMapTensor", byref(events[2]), c_uint64(1), None, None),
        loaded("synEventRecord", events[0], streams[0]),
        loaded("synStreamWaitEvent", streams[1], events[0], 0),
        loaded("synEventQuery", events[0]),
        loaded("synEventSynchronize", events[0]),
        loaded("synEventElapsedTime", byref(nanoseconds), events[0], events[1]),
        loaded("synStreamQuery", streams[0]),
        loaded("synStreamSynchronize", streams[0]),
        loaded("synDeviceSynchronize", 0),
        *(loaded("synEventDestroy", event) for event in events),
        *(loaded("synStreamDestroy", stream) for stream in streams),
    ]
    assert done == [SUCCESS] * len(done)
    assert nanoseconds.value > 0
    assert loaded.calls_of_the_original == 0


def test_recipes_are_those_of_the_original_and_written_down(loaded: Loaded) -> None:
    recipe = c_void_p()
    assert loaded("synGraphCompile", byref(recipe), c_void_p(24), c_char_p(b"forward_1"), None) == SUCCESS
    assert recipe.value == 24
    assert loaded("synGraphCompile", byref(recipe), c_void_p(25), c_char_p(b"wrong"), None) == FAILED
    assert loaded.calls_of_the_original == 2
    assert loaded.log.read_text().startswith("loaded\n")
    found = read_recipes(loaded.log)
    assert found is not None
    assert [(made.status, made.workspace, made.name) for made in found] == [(0, 1024, "forward_1"), (26, 0, "wrong")]
    assert all(0 <= made.microseconds < 10**7 for made in found)


# ---- the report --------------------------------------------------------------------------------------------

FINE: dict[str, Any] = {"error": None, "runs": {"decodes": 2}, "failures": [], "fallbacks": {"aten::sort": 3}}
RECIPES = [Recipe(0, 2_500_000, 3 * GIB, "forward_1"), Recipe(0, 100, 0, "sample_2")]


def test_report_of_graphs_that_compile() -> None:
    assert find_faults(FINE, RECIPES, rehearsal=False) == []
    text = describe(FINE, RECIPES, [])
    assert "recipes: 2 compiled, 0 failed, 2.5 s" in text
    assert "compiled longest: 2.50 s, forward_1" in text
    assert "largest workspace: 3" in text
    assert "falls back to the CPU: aten::sort x 3" in text
    assert text.endswith("nothing failed")


def test_what_did_not_compile_is_a_fault() -> None:
    job = {"kind": "decodes", "signatures": ["(1, 2)"], "error": "RuntimeError: status 26"}
    broken = FINE | {"failures": [job, job], "error": "ValueError: no model"}
    faults = find_faults(broken, [*RECIPES, Recipe(26, 5, 0, "forward_3")], rehearsal=False)
    assert len(faults) == 3
    assert "ValueError: no model" in faults[0]
    assert "decodes (1, 2): RuntimeError: status 26" in faults[1]
    assert "forward_3, status 26" in faults[2]
    assert "recipes: 2 compiled, 1 failed" in describe(broken, [*RECIPES, Recipe(26, 5, 0, "forward_3")], faults)


def test_a_bridge_that_loads_another_library_is_a_fault(tmp_path: Path) -> None:
    assert find_faults(FINE, read_recipes(tmp_path / "none"), rehearsal=False) != []
    assert find_faults(FINE, [], rehearsal=False) == ["no graph was compiled"]
    assert find_faults(FINE, None, rehearsal=True) == []


def test_warm_up_goes_on_after_a_job_that_fails() -> None:
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("Graph compile failed\nin a recipe")

    listed = [Job("decodes", fail, ((1, "x"),)), Job("decodes", lambda: ran.append("second"))]
    attempts = Attempts()
    memory = SimpleNamespace(synchronize=lambda: ran.append("waited"))
    runner: Any = SimpleNamespace(backend=SimpleNamespace(memory=memory))
    for job in attempts.wrap(lambda runner: iter(listed))(runner):
        job.run()
    assert ran == ["second", "waited"]
    assert attempts.runs == {"decodes": 2}
    (failure,) = attempts.failures
    assert failure["signatures"] == ["(1, 'x')"]
    assert "Graph compile failed" in failure["error"]


def test_without_intels_library_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify_compile.py", "--library", str(tmp_path / NAME)])
    assert verify_compile.main() == 2
    assert capsys.readouterr().err.startswith(f"error: there is no {tmp_path / NAME}")


def test_make_chooses_by_mode() -> None:
    def targets(*variables: str) -> str:
        command = ["make", "--dry-run", "verify-gaudi", *variables]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "tests.verify_compile" in targets("MODE=compile")
    assert "tests.verify_device gaudi" in targets()
