"""The benchmarks of steps on a device run, and count what they say they count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import device_trace
import dummy
import end_to_end
import real_weights
import scaling

BENCHMARKS = Path(scaling.__file__).parent
RUNS = {
    "verify": ["--batches", "2", "--contexts", "64", "--num-speculative-tokens", "2", "4", "--repeats", "2"],
    "end_to_end": ["--batches", "2", "--rates", "1.0", "--steps", "4", "--repeats", "2"],
    "host_overhead": ["--batches", "2", "4", "--steps", "5"],
}
# One after the other in one process, since vLLM takes longer to import than they take to run.
RUN_ALL = """
import importlib, json, sys
for name, words in json.loads(sys.argv[1]).items():
    sys.argv = [name, "--size", "tiny", *words]
    assert importlib.import_module(name).main() == 0
"""


@pytest.mark.slow
def test_tiny_models_run_everywhere(tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"{name}.json") for name in RUNS}
    words = {name: [*options, "--json", files[name]] for name, options in RUNS.items()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VGS_DEVICE": "cpu"}
    subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(words)], check=True, timeout=300, cwd=BENCHMARKS, env=environment
    )
    found: dict[str, Any] = {name: json.loads(Path(file).read_text()) for name, file in files.items()}

    assert [(row["batch"], row["k"]) for row in found["verify"]["rows"]] == [(2, 2), (2, 4)]
    (row,) = found["end_to_end"]["rows"]
    assert row["tokens_per_step"] == 5.0  # every draft is accepted
    assert set(row["plain"]["device_s"]) == {"forward", "finish", "report"}
    assert set(row["drafted"]["device_s"]) == {"forward", "finish", "draft", "report"}
    for row in found["host_overhead"]["rows"]:
        called = {name for name, us in row["phases_us"].items() if us > 0}
        assert called == {*row["phases_us"]} - {"wait"}

    scaled = tmp_path / "scaling.json"
    command = [sys.executable, str(BENCHMARKS / "scaling.py"), *files.values(), "--json", str(scaled)]
    subprocess.run(command, check=True, timeout=60)
    axes = {(line["figure"], line["axis"]) for line in json.loads(scaled.read_text())}
    assert axes == {("verify_ms", "k"), ("flattened_ms", "k"), ("us_per_step", "batch")}


def test_busy_time_counts_overlap_once() -> None:
    busy, gaps = device_trace.gaps_of([(0, 10), (5, 8), (9, 12), (30, 40), (13, 30)])
    assert busy == 12 + 27
    assert gaps == [1]


def test_gaps_between_steps_are_told_from_those_between_kernels() -> None:
    table = device_trace.table_of([(0, 40), (42, 80), (100, 140), (142, 180)], steps=2)
    assert table["busy_us"] == 78
    assert (table["short_gaps_us"], table["long_gaps_us"], table["long_gaps"]) == (2, 10, 0.5)
    assert table["idle_share"] == pytest.approx(24 / 180)
    assert table["idle_share_in_long_gaps"] == pytest.approx(20 / 180)


def test_silent_profiler_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing run"):
        device_trace.table_of([], steps=1)


def test_rates_are_those_of_whole_prefixes() -> None:
    assert dummy.rates_of(0.5, 3) == [0.5, 0.25, 0.125]


def test_ideal_is_what_the_programs_alone_would_give() -> None:
    plain = {"tok_s": 80.0, "step_s": 0.0125, "device_s": {"forward": 0.008, "finish": 0.002}}
    drafted = {
        "tok_s": 120.0,
        "tokens_per_step": 2.4,
        "step_s": 0.02,
        "device_s": {"forward": 0.009, "finish": 0.003, "draft": 0.004},
        "host_s": {"apply": 0.001, "report": 0.003},
    }
    found = end_to_end.figures(plain, drafted)
    assert found["ideal_speedup"] == pytest.approx(2.4 * 12.5 / 16)
    assert found["of_ideal"] == pytest.approx(0.8), "as much as the device is busy"
    assert found["idle_by_clock"] == pytest.approx(0.2)
    assert found["host_over_device"] == pytest.approx(0.25)


def test_growth_along_an_axis() -> None:
    rows = [
        {"rule": rule, "batch": 8, "drafts": 4, "vocab": vocab, "seconds": {"ours": scale * vocab}}
        for rule, scale in (("strict", 1.0), ("block", 3.0))
        for vocab in (1000, 4000)
    ]
    lines = list(scaling.lines_of("rejection", rows))
    assert [(line.axis, line.fixed["rule"]) for line in lines] == [("vocab", "strict"), ("vocab", "block")]
    assert lines[1].points == [(1000, 3000.0), (4000, 12000.0)]
    assert lines[1].exponent == pytest.approx(1.0)


def test_real_weights_are_counted_as_their_requests_were() -> None:
    requests = [{"tokens": 30, "steps": 10, "accepted": [2] * 10}, {"tokens": 10, "steps": 10, "accepted": [0] * 10}]
    turns = [
        {"plain": {"requests": [], "seconds": 3.0 * slow}, "drafted": {"requests": requests, "seconds": 2.0 * slow}}
        for slow in (1.0, 7.0, 2.0)
    ]
    found = SimpleNamespace(**real_weights.figures(turns, k=2))
    # A slow turn is slow for both, so the interval is a point.
    assert found.speedup == pytest.approx((1.5, 1.5, 1.5))
    assert (found.plain_tok_s, found.drafted_tok_s, found.tokens_per_step["value"]) == (42 / 6, 42 / 4, 2.0)
    assert [place["value"] for place in found.accepted_at] == [0.5, 0.5]
