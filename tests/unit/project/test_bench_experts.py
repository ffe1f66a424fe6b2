"""The benchmark of experts runs, and its forms compute the same, which it looks at itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "experts.py"


@pytest.mark.slow
def test_forms(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = [
        "--shape",
        "16,2,64,32",
        "--tokens",
        "1",
        "1024",
        "--repeats",
        "1",
        "--seconds",
        "0",
        "--json",
        str(report),
    ]
    subprocess.run(
        [sys.executable, str(BENCHMARK), *options],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    few, many = json.loads(report.read_text())[0]["rows"]
    assert set(few["ms"]) == {"all at once", "dense", "gathered", "grouped", "Gaudi's, emulated"}
    assert (few["with an operator"], few["without"]) == ("grouped", "gathered")
    assert (many["with an operator"], many["without"]) == ("grouped", "dense")
    # Both hold products, gates and what comes of them; slices a part of them.
    assert many["peak"]["dense"] < many["peak"]["all at once"]
    assert many["peak"]["all at once"] >= 1024 * 16 * (64 + 32) * 4
