"""Hostile options and drafters' folders: the start ends at once, with one clear line, and nothing of theirs is run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests.abuse.folders import HUGE_ID, hostile_copy, ran, with_a_huge_id
from tests.full_tests.server import last_line, serve_environment

DEEP = "[" * 100_000
HUGE = 10**40

# What is given as --additional-config, and words that the last line must have.
ADDITIONAL: list[tuple[str, list[str]]] = [
    ("{", ["additional_config"]),
    (DEEP, ["additional_config"]),
]
# The same below gaudi_spec.
OURS: list[tuple[Any, list[str]]] = [
    ({"batch_invariant": {"deep": {"deeper": []}}}, ["batch_invariant", "true or false"]),
    ({"batch_buckets": list(range(-5, 100_000))}, ["batch_buckets"]),
    ({"draft_quant_config": "/dev/zero"}, ["draft_quant_config"]),
]
SPECULATIVE: list[tuple[str, list[str]]] = [
    ("{", ["--speculative-config"]),
    ('{"method": "no such", "num_speculative_tokens": 3}', ["method"]),
    ('{"method": "ngram", "num_speculative_tokens": 0}', ["num_speculative_tokens"]),
    (f'{{"method": "ngram", "num_speculative_tokens": {HUGE}}}', ["num_speculative_tokens"]),
    ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": -1}', ["prompt_lookup"]),
    ('{"method": "draft_model", "model": "/no/such", "num_speculative_tokens": 3}', ["/no/such"]),
    ('{"method": "draft_model", "model": "/etc/passwd", "num_speculative_tokens": 3}', ["/etc/passwd"]),
]


def drafting(folder: Path, **more: Any) -> list[str]:
    given = dict(method="draft_model", model=str(folder), num_speculative_tokens=3) | more
    return ["--speculative-config", json.dumps(given)]


def run(model: str, folder: Path, cases: list[list[str]], **environment: str) -> list[tuple[int, str]]:
    """Exit status and output of each."""
    (folder / "cases").write_text(json.dumps([[model, "--dtype", "float32", *case] for case in cases]))
    command = [sys.executable, "-m", "tests.full_tests.abuse.starts", str(folder / "cases"), str(folder / "results")]
    subprocess.run(
        command, check=True, timeout=600, env=serve_environment(**environment), capture_output=True, cwd=Path.cwd()
    )
    return [tuple(result) for result in json.loads((folder / "results").read_text())]


@pytest.fixture
def pickled(cousin: str, tmp_path: Path) -> Path:
    """A drafter with pickled weights and no others."""
    folder = hostile_copy(cousin, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def unknown(cousin: str, tmp_path: Path) -> Path:
    """A drafter that nobody can read without its code."""
    folder = hostile_copy(cousin, tmp_path / "unknown")
    described = json.loads((folder / "config.json").read_text()) | {"model_type": "of_its_own"}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_hostile_options_end_with_one_clear_line(
    every: int, looping_llama: str, cousin: str, pickled: Path, unknown: Path, tmp_path: Path
) -> None:
    huge = with_a_huge_id(cousin, tmp_path / "huge")
    cases = [(["--additional-config", given], words) for given, words in ADDITIONAL]
    cases += [(["--additional-config", json.dumps({"gaudi_spec": given})], words) for given, words in OURS]
    cases += [(["--speculative-config", given], words) for given, words in SPECULATIVE]
    cases = cases[::every]
    cases += [
        (drafting(pickled), ["pickles", "safetensors"]),
        (drafting(pickled, draft_load_config={"load_format": "pt"}), ["pickles", "safetensors"]),
        (drafting(huge, method="universal_draft"), [str(HUGE_ID), "tokenizer.json"]),
        (drafting(unknown), ["trust_remote_code"]),
        (
            [*drafting(unknown), "--trust-remote-code"],
            ["--trust-remote-code is for the target", "VGS_TRUST_DRAFT_CODE"],
        ),
    ]
    bad = []
    for (case, words), (status, output) in zip(cases, run(looping_llama, tmp_path, [c for c, _ in cases]), strict=True):
        line = last_line(output)
        missing = [word for word in words if word not in line]
        if status <= 0 or missing or "error: " not in line or len(line) > 2000:
            bad.append(f"{str(case)[:200]}: status {status}, {missing} not in the last line: {line[:500]}")
    print(f"{len(cases)} hostile starts, {len(cases) - len(bad)} ended with an error and one clear line")
    assert not bad, "\n".join(bad)
    assert ran(pickled) == []
    assert ran(unknown) == []


@pytest.mark.slow
def test_trusted_code_runs(looping_llama: str, unknown: Path, tmp_path: Path) -> None:
    """So that the test above shows something: the same start, and the user says so. It is refused later, for k."""
    case = [*drafting(unknown, num_speculative_tokens=17), "--trust-remote-code"]
    trusted = dict(VGS_TRUST_DRAFT_CODE="1", HF_MODULES_CACHE=str(tmp_path / "modules"))
    ((status, output),) = run(looping_llama, tmp_path, [case], **trusted)
    assert status != 0
    assert "16 or less" in last_line(output)
    assert ran(unknown) == ["ran-code"]
