"""`vllm serve` answers as an OpenAI server does: completions, chat, streams, stop strings, n and seeds."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from tests.full_tests.server import Server
from vllm_gaudi_spec.environment import OPENMP

GREEDY: dict[str, Any] = dict(prompt="The quick brown", max_tokens=24, temperature=0, ignore_eos=True)


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def test_models_and_health(server: Server) -> None:
    assert server.client.get("/health").status_code == 200
    models = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny"]


@pytest.mark.skipif(not OPENMP.exists(), reason="without the package intel-openmp")
def test_engine_uses_intel_openmp(server: Server) -> None:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = [process for process in processes if "EngineCore" in process.name()]
    assert OPENMP.name in Path(f"/proc/{engine.pid}/maps").read_text()


def test_completion_and_metrics(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    answer = server.complete(**GREEDY)
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"
    assert text(answer)
    assert text(answer) == text(server.complete(**GREEDY))
    server.wait_idle()
    assert server.metric("vllm:generation_tokens_total") - before == 48
    steps, reads = (server.metric(f"gaudi_spec:{name}_total") for name in ("steps", "host_syncs"))
    assert 0 < reads <= steps
    assert server.metric("gaudi_spec:compiled_after_warmup_total") == 0


def test_streaming(server: Server) -> None:
    """The pieces of a stream add up to the answer in one piece."""
    long = GREEDY | dict(max_tokens=600)
    body = long | dict(model="tiny", stream=True, stream_options=dict(include_usage=True))
    pieces, usage = [], None
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    for event in map(json.loads, events):
        usage = event.get("usage") or usage
        pieces += [choice["text"] for choice in event["choices"]]
    # The engine is faster than the stream: a piece may hold many tokens, but the first comes before the last is made,
    # of so many also where other processes keep the front end from running for a while.
    assert len(pieces) > 1
    assert "".join(pieces) == text(server.complete(**long))
    assert usage["completion_tokens"] == 600


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=str(server.client.base_url) + "/v1", api_key="none")


def test_chat(server: Server, client: OpenAI) -> None:
    """The chat template is the tiny tokenizer's."""
    messages: Any = [dict(role="system", content="Be brief."), dict(role="user", content="Who are you?")]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    prompt = "system: Be brief.\nuser: Who are you?\nassistant: "
    plain = server.complete(prompt=prompt, max_tokens=12, temperature=0)
    assert chat.choices[0].message.content == text(plain)
    stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text(plain)


def test_responses(client: OpenAI) -> None:
    sampling: Any = dict(model="tiny", temperature=0)
    question: Any = dict(role="user", content="Who are you?")
    chat = client.chat.completions.create(messages=[question], max_tokens=12, **sampling)
    responded = client.responses.create(input="Who are you?", max_output_tokens=12, **sampling)
    assert responded.output_text == chat.choices[0].message.content


def test_stop_string(server: Server) -> None:
    whole = text(server.complete(**GREEDY))
    stop = next(whole[i : i + 2] for i in range(8, len(whole)) if whole[i : i + 2].isascii())
    answer = server.complete(**GREEDY, stop=[stop, "never in the text"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == stop
    assert text(answer) == whole[: whole.index(stop)]
    kept = server.complete(**GREEDY, stop=stop, include_stop_str_in_output=True)
    assert text(kept) == text(answer) + stop


def test_seeds_and_n(server: Server) -> None:
    body = GREEDY | dict(temperature=1.0, n=3, seed=7)
    first, again = (server.complete(**body)["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert len({choice["text"] for choice in first}) == 3, "completions of one request differ from each other"
    other = server.complete(**body | dict(seed=8))["choices"]
    assert other[0]["text"] != first[0]["text"]
    unseeded = [text(server.complete(**GREEDY | dict(temperature=1.0))) for _ in range(3)]
    assert len(set(unseeded)) == 3, "without a seed every request draws its own"
