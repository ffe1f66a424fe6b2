"""Clients of other people's against our server, which drafts: what they return is what the server answers over HTTP.

Each runs in the environment of requirements/clients.txt; docs/how_to/clients.md has the versions."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests.server import Server, end_with_parent
from tests.support.processes import ROOT, clients_python

pytestmark = pytest.mark.slow

DRAFTS = {"method": "draft_model", "model": str(ROOT / "demo" / "draft-same-vocab"), "num_speculative_tokens": 3}
# A small model would fill JSON with blanks.
COMPACT = ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
PAGE = ROOT / "docs" / "how_to" / "clients.md"
CITIES = [{"city": "Paris"}, {"city": "Rome"}]
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def python() -> str:
    return clients_python()


@pytest.fixture(scope="module")
def drafting(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("clients") / "log.txt"
    options = ("--max-num-seqs", "4", "--max-model-len", "1024", "--enable-tokenizer-info-endpoint", *COMPACT, *TOOLS)
    with Server(demo_model, log, *options, "--speculative-config", json.dumps(DRAFTS)) as server:
        yield server


@pytest.fixture(autouse=True)
def drafts_are_accepted(drafting: Server) -> Iterator[None]:
    name = "vllm:spec_decode_num_accepted_tokens_total"
    before = drafting.metric(name)
    yield
    drafting.wait_idle()
    assert drafting.metric(name) > before


def calls(client: str, python: str, server: Server) -> dict[str, Any]:
    """Return what the calls returned. The page has a row with the client's version."""
    done = subprocess.run(
        [python, str(ROOT / "tests" / "clients" / f"{client}_calls.py"), f"http://127.0.0.1:{server.port}/v1"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=end_with_parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    check_row(client, found["version"])
    return found["calls"]


def check_row(client: str, version: str) -> None:
    rows = re.findall(r"(?m)^\| [^|]+ \| `([\w-]+)` \| ([\w.]+) \|", PAGE.read_text())
    assert (client, version) in rows


def chat(server: Server) -> tuple[str, int]:
    """The text and the number of its tokens."""
    body = dict(messages=[dict(role="user", content="Who are you?")], max_tokens=40, temperature=0)
    found = server.post("/v1/chat/completions", body)
    return found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"]


def completion(server: Server) -> str:
    return server.complete(prompt="The quick", max_tokens=40, temperature=0)["choices"][0]["text"]


def test_openai(python: str, drafting: Server) -> None:
    found = calls("openai", python, drafting)
    text, num_tokens = chat(drafting)
    assert found["models"] == ["tiny"]
    assert found["chat"] == found["chat, streamed"] == text
    assert found["chat, async and async streamed"] == [text, text]
    assert found["chat with logprobs"] == {"tokens": num_tokens, "the best": True}
    assert found["usage of a stream"] == num_tokens
    assert found["stop string"] == text.partition(" ")[0]
    assert len(set(found["n = 2 with a seed"])) == 2
    assert json.loads(found["JSON schema"]) in CITIES
    for name, arguments in (found["tool call"], found["tool call, streamed"]):
        assert name == "weather"
        assert json.loads(arguments) in CITIES
    assert found["completion"] == completion(drafting)
    assert found["responses"] == text
    assert "no-such-model" in found["unknown model"]


@pytest.mark.parametrize("client", ["litellm", "langchain"])
def test_litellm_and_langchain(client: str, python: str, drafting: Server) -> None:
    found = calls(client, python, drafting)
    text, _ = chat(drafting)
    name, arguments = found.pop("tool call")
    assert name == "weather"
    assert arguments in CITIES
    for name, answer in found.items():
        assert answer == ([text] * 3 if name == "batch" else text), name


def test_lm_eval(python: str, drafting: Server) -> None:
    found = calls("lm_eval", python, drafting)
    assert found["generate_until"] == completion(drafting)
    for total, text in zip(found["loglikelihood"], (" brown fox", " lazy dog"), strict=True):
        body = dict(prompt=f"The quick{text}", max_tokens=1, temperature=0, echo=True, logprobs=1)
        logprobs = drafting.complete(**body)["choices"][0]["logprobs"]
        first = next(index for index, offset in enumerate(logprobs["text_offset"]) if offset >= len("The quick"))
        assert math.isclose(total, sum(logprobs["token_logprobs"][first:-1]), rel_tol=1e-4)


def test_guidellm(python: str, drafting: Server) -> None:
    for name, answers in calls("guidellm", python, drafting).items():
        assert len({json.dumps(one["body"]) for one in answers}) == 3, "as many as it was given, none failed"
        for one in answers:
            body = one["body"] | {"stream": False}
            body.pop("stream_options")
            found = drafting.post("/v1/chat/completions" if name.startswith("chat") else "/v1/completions", body)
            (choice,) = found["choices"]
            assert one["text"] == (choice["message"]["content"] if name.startswith("chat") else choice["text"])
            assert one["tokens"] == found["usage"]["completion_tokens"]


def test_vllm_bench_serve(drafting: Server, demo_model: str, tmp_path: Path) -> None:
    """Of our environment: it comes with vLLM."""
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve"]
    options = dict(base_url=f"http://127.0.0.1:{drafting.port}", model="tiny", tokenizer=demo_model, seed=0)
    options |= dict(dataset_name="random", random_input_len=16, random_output_len=32, num_prompts=6, max_concurrency=2)
    options |= dict(result_dir=tmp_path, result_filename="bench.json")
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [*command, *words, "--ignore-eos", "--save-result"],
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=end_with_parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["total_output_tokens"] == 6 * 32
    assert found["spec_decode_acceptance_length"] > 1
