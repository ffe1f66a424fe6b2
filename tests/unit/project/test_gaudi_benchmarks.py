"""Benchmarks on the emulated Gaudi say what the documentation quotes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def rows(folder: Path, name: str, *options: str) -> list[dict[str, Any]]:
    # In a process of its own: the emulator changes torch for good.
    report = folder / "report.json"
    subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options, "--json", str(report)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    return found


def test_numbers_of_graphs(tmp_path: Path) -> None:
    (row,) = (
        row
        for row in rows(tmp_path, "gaudi_graphs.py")
        if (row["max_num_seqs"], row["max_model_len"], row["strategy"], row["k"]) == (64, 4096, "exponential", 3)
    )
    assert (row["decode"], row["prompt"], row["finish"], row["total"]) == (84, 22, 29, 141)
    assert (row["draft_greedy"], row["draft_random"], row["draft_head"]) == (72, 240, 156)


def test_bytes_of_kv_read(tmp_path: Path) -> None:
    """A verify step reads each listed block once; flattened rows read it once a row."""
    (row,) = rows(tmp_path, "gaudi_layout.py", "--batches", "2", "--contexts", "300", "--drafts", "3")
    assert row["blocks"] == 2 * 3
    assert row["listed_bytes"] == row["blocks"] * 2 * 128 * 2 * 16 * 4
    assert (row["ours_ratio"], row["flattened_ratio"]) == (1.0, 4.0)
    assert row["difference"] < 1e-5
    times = row["estimated_ms"]["gaudi2"]
    assert times["ours"] < times["flattened"]
