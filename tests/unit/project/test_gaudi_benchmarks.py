"""Benchmarks on the emulated Gaudi say what the documentation quotes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def found_by(folder: Path, name: str, *options: str) -> dict[str, Any]:
    # In a process of its own: the emulator changes torch for good.
    report = folder / "report.json"
    subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options, "--json", str(report)],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_numbers_of_graphs(tmp_path: Path) -> None:
    found = found_by(tmp_path, "gaudi_graphs.py")
    (row,) = (
        row
        for row in found["rows"]
        if (row["max_num_seqs"], row["max_model_len"], row["strategy"], row["k"]) == (64, 4096, "exponential", 3)
    )
    assert (row["decode"], row["prompt"], row["finish"], row["total"]) == (84, 19, 29, 138)
    assert (row["draft_greedy"], row["draft_random"], row["draft_head"]) == (69, 237, 153)
    page = (BENCHMARKS.parent / "docs" / "gaudi.md").read_text()
    assert len(found["days"]) == 12
    for day in found["days"]:
        minutes = "{cold:.1f} / {cached:.1f}".format(**day["minutes"])
        assert max(day["bytes"].values()) <= day["left_bytes"]
        sizes = (day["decode_bytes_at_once"], *day["bytes"].values(), day["left_bytes"], day["kv_bytes"])
        gib = [f"{size / 2**30:.1f}" for size in sizes]
        graphs = ", ".join(str(day[kind]) for kind in ("decode", "prompt", "finish", "others"))
        size = f"{day['max_num_seqs']} x {day['max_model_len']}"
        cells = (day["model"], size, day["k"] or "none", graphs, day["recipes"], minutes, *gib)
        assert f"| {' | '.join(map(str, cells))} |" in page


def test_a_step_that_does_not_fit_ends_the_list_of_graphs() -> None:
    code = (
        "import sys, dataclasses, gaudi_graphs as graphs\n"
        "sys.argv = ['gaudi_graphs.py']\n"
        "heavy = dataclasses.replace(graphs.MODELS[0], name='heavy', weights=graphs.CARD_BYTES - 6 * 2**30)\n"
        "graphs.MODELS, graphs.SIZES, graphs.DAY_SIZES = (heavy,), (), ((256, 8192),)\n"
        "graphs.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    words = "heavy, 256 x 8192: sampling .* 5.5 GiB, and 5.5 GiB are left; 0 blocks of KV are less than a request"
    assert re.search(words, done.stderr), done.stderr


def test_bytes_of_kv_read(tmp_path: Path) -> None:
    """A verify step reads each listed block once; flattened rows read it once a row."""
    (row,) = found_by(
        tmp_path, "gaudi_layout.py", "--batches", "2", "--contexts", "300", "--num-speculative-tokens", "3"
    )["rows"]
    assert row["blocks"] == 2 * 3
    assert row["listed_bytes"] == row["blocks"] * 2 * 128 * 2 * 16 * 4
    assert (row["ours_ratio"], row["flattened_ratio"]) == (1.0, 4.0)
    assert row["difference"] < 1e-5
    times = row["estimated_ms"]["gaudi2"]
    assert times["ours"] < times["flattened"]
