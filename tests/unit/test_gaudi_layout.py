"""On the emulated Gaudi a verify step reads each listed block once; flattened rows read it once a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gaudi_layout.py"


def test_bytes_of_kv_read(tmp_path: Path) -> None:
    # In a process of its own: the emulator changes torch for good.
    report = tmp_path / "layout.json"
    sizes = ["--batches", "2", "--contexts", "300", "--drafts", "3"]
    subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, "--json", str(report)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (row,) = json.loads(report.read_text())["rows"]
    assert row["blocks"] == 2 * 3
    assert row["listed_bytes"] == row["blocks"] * 2 * 128 * 2 * 16 * 4
    assert (row["ours_ratio"], row["flattened_ratio"]) == (1.0, 4.0)
    assert row["difference"] < 1e-5
    times = row["estimated_ms"]["gaudi2"]
    assert times["ours"] < times["flattened"]
