"""`gaudi-spec graph-check` says clean of what is clean; tests/unit/tools/test_graph_check.py has what is not."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import verify_compile
from tests.support.processes import run

ROOT = Path(__file__).parents[2]
SMALL = ("--dtype", "float32", "--max-num-seqs", "4")


def test_clean_engine_is_reported_clean(tiny_llama: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    drafter = {"method": "draft_model", "model": tiny_llama, "num_speculative_tokens": 2}
    options = (*SMALL, "--max-model-len", "256", "--requests", "4", "--json", str(file))
    status, said = graph_check(tiny_llama, *options, speculation=drafter)
    assert status == 0, said
    assert said.strip().splitlines()[-1].startswith("clean: "), said
    result = json.loads(file.read_text())
    mixed = result["phases"]["mixed"]
    assert (mixed["compiles"], mixed["max_syncs_in_a_step"], mixed["fallbacks"], mixed["garbage_reads"]) == (0, 1, 0, 0)
    assert mixed["steps"] >= mixed["host_syncs"] > 4
    assert mixed["kv_bytes_read"] > 0
    assert result["graphs"]["captured"] > result["graphs"]["never_used"]


def test_compile_only_mode_runs_every_job_of_the_warm_up(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above the emulated card; tests/unit/project/test_verify_compile.py tests what stands in for a real one."""
    monkeypatch.setattr(verify_compile, "OUT", tmp_path / "out")
    options = (*SMALL, "--max-model-len", "128")
    monkeypatch.setattr(sys, "argv", ["verify_compile.py", "--rehearse", tiny_llama, *options])
    status = verify_compile.main()
    assert status == 0, (tmp_path / "out" / "engine.log").read_text()[-2000:]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {"decodes", "prompt chunks", "sampling passes"} <= report["runs"].keys()
    assert (report["faults"], report["recipes"], report["fallbacks"]) == ([], [], {})
    assert "falls back to the CPU: nothing" in capsys.readouterr().out


def graph_check(*arguments: str, speculation: dict[str, Any]) -> tuple[int, str]:
    """Return the exit status and everything that was printed."""
    words = ["graph-check", *arguments, "--speculative-config", json.dumps(speculation)]
    command = [sys.executable, "-m", "vllm_gaudi_spec.tools.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run(command, env=environment, timeout=500)
    return done.returncode, done.stdout
