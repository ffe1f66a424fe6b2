"""calibration/compare_reference.py: our engine beside transformers, on a tiny model; the reference's environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "calibration" / "compare_reference.py"
REQUIREMENTS = ROOT / "requirements" / "optimum-habana.in"
ENGINE = json.dumps({"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True})


def script(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options, "--engine", ENGINE]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_transformers_say_the_same(speculative: dict[str, object] | None, looping_llama: str, tmp_path: Path) -> None:
    drafting = ["--speculative-config", json.dumps(speculative)] if speculative else []
    given = ["--limit", "4", "--output-len", "12", "--out", str(tmp_path), *drafting]
    done = script(looping_llama, *given)
    assert done.returncode == 0, done.stderr
    assert "there is no Gaudi, so not optimum-habana" in done.stderr
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert (report["of"], report["equal"] + report["tied"]) == (4, 4)
    assert report["num_scored"] > 4 * 12
    assert report["largest"] < 1e-3
    assert f"texts equal: {report['equal']} of 4" in done.stdout


@pytest.mark.slow
def test_a_reference_that_does_not_start(looping_llama: str, tmp_path: Path) -> None:
    done = script(looping_llama, "--python", "/no/such/python", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("compare_reference: error: ")
    assert "/no/such/python" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_requirements_of_the_reference_resolve_alone(tmp_path: Path) -> None:
    """By what the indexes of this machine have; nothing is installed. torch is the image's own."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run(
        [*command, "--report", str(report), "-r", str(REQUIREMENTS)], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
    installs = json.loads(report.read_text())["install"]
    versions = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in installs}
    assert versions["optimum-habana"].startswith("1.21.")
    assert versions["transformers"].startswith("4.55.")
    assert "vllm" not in versions
