"""The benchmark of the CPU's small GEMM runs, and its candidates multiply."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gaudi_spec.devices.cpu.linear import has_int8_kernel

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "gemm.py"


@pytest.mark.slow
def test_candidates_and_their_errors(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--size", "tiny", "--rows", "1", "5", "--repeats", "1", "--json", str(report)]
    subprocess.run(
        [sys.executable, str(BENCHMARK), *options],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    written = json.loads(report.read_text())
    rows = {(row["candidate"], row["rows"]): row for row in written["rows"]}
    for name in ("oneDNN packed, as vLLM", "F.linear", "mm, weights first", "float16 weights, FBGEMM"):
        for num in (1, 5):
            row = rows[name, num]
            assert row["error"] < 1e-6, name
            assert set(row["matrices_ms"]) == {"qkv", "o", "gate_up", "down", "lm_head"}
            assert row["over_bound"] > 0
    narrow, wide = rows["float16 weights, FBGEMM", 1], rows["F.linear", 1]
    assert narrow["bound_ms"] * 2 == wide["bound_ms"]
    # Without VNNI the sums of int8 products saturate, and nothing of ours uses them.
    rough = ("int4",) if has_int8_kernel() else ("int4", "int8")
    assert all(row["error"] < 0.05 for name, row in rows.items() if not any(word in name[0] for word in rough))
