"""The examples with tiny models. As their README has them, tests/full_tests/test_docs_commands.py runs them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full_tests.server import Server, end_with_parent
from tests.pages import commands_for
from tests.support.ports import free_port
from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def example(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    return subprocess.run(
        words,
        env=inherited | environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=end_with_parent,
    )


def python(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return example(sys.executable, str(EXAMPLES / name), *options)


def test_universal_drafting_example(looping_llama: str) -> None:
    """The example accepts most drafts if the target is its own drafter."""
    done = python("universal_drafting.py", "--model", looping_llama, "--draft", looping_llama)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("\nWhy is the sky blue?\n") == 1
    assert "100% of the target's tokens have a counterpart" in done.stdout
    found = re.fullmatch(r"(\d+) tokens; (\d+) were drafted, (\d+) of them accepted", done.stdout.splitlines()[-1])
    assert found is not None, done.stdout
    tokens, drafted, accepted = map(int, found.groups())
    assert drafted / 2 < accepted <= drafted
    assert accepted < tokens <= 3 * 48


def test_measure_drafter_example(looping_llama: str, cousin: str, tmp_path: Path) -> None:
    """A drafter that equals its target is always right, and another one is not."""
    for name, draft in {"same": looping_llama, "cousin": cousin}.items():
        options = ("--model", looping_llama, "--draft", draft, "-k", "3", "--json", str(tmp_path / f"{name}.json"))
        done = python("measure_drafter.py", *options)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(re.findall(r"(?m)^[123]  .* of a step$", done.stdout)) == 3
    same, other = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("same", "cousin"))
    assert [row["length"] for row in same] == pytest.approx([2, 3, 4], abs=0.1)
    assert all(row["length"] < 1 + row["k"] for row in other)
    assert all(row["break_even"] == pytest.approx((row["length"] - 1) / row["k"]) for row in (*same, *other))


def test_stream_example(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    (command,) = commands_for("tests/full_tests/test_examples.py::test_stream_example", EXAMPLES / "README.md")
    interpreter, *words = shlex.split(command)
    assert interpreter == ".venv/bin/python"
    url = f"http://127.0.0.1:{server.port}/v1"
    done = example(sys.executable, *words, "--url", url, "--max-tokens", "24")
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.fullmatch(r"(\d+) tokens in [\d.]+ s, the first after [\d.]+ s", done.stdout.splitlines()[-1])
    assert found is not None, done.stdout
    assert int(found[1]) == server.metric("vllm:generation_tokens_total") - before > 0
    assert len(done.stdout.split("\n\n")[0]) > 0


def test_stream_example_without_a_server() -> None:
    done = python("stream.py", "--url", f"http://127.0.0.1:{free_port()}/v1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("start one with `make serve`, or pass --url")


SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "2")


@pytest.mark.slow
def test_bench_reports_the_speedup(looping_llama: str, tmp_path: Path) -> None:
    """Both servers come and go, and the speedup is the ratio of the two throughputs that the benchmark wrote."""
    options = {"MODEL": looping_llama, "SPECULATION": json.dumps(NGRAM), "PORT": str(free_port())}
    sizes = {"REQUESTS": "4", "TOKENS": "32", "WORK": str(tmp_path)}
    done = example(str(EXAMPLES / "bench.sh"), *SMALL, **options, **sizes)
    assert done.returncode == 0, done.stderr
    plain, drafted = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "speculating"))
    assert plain["completed"] == drafted["completed"] == 4
    assert plain["total_output_tokens"] == drafted["total_output_tokens"] == 4 * 32
    assert "spec_decode_acceptance_length" not in plain
    assert drafted["spec_decode_acceptance_length"] > 1
    ratio = drafted["output_throughput"] / plain["output_throughput"]
    assert done.stdout.splitlines()[-1].split() == ["speedup", f"{ratio:.2f}"]


def test_bench_refuses_a_port_in_use(server: Server, looping_llama: str, tmp_path: Path) -> None:
    """It measures no other server."""
    done = example(str(EXAMPLES / "bench.sh"), MODEL=looping_llama, PORT=str(server.port), WORK=str(tmp_path))
    assert done.returncode == 1
    assert "answers at http://127.0.0.1" in done.stderr
    assert not list(tmp_path.glob("*.log"))
