"""Bad input gets a 4xx in OpenAI's form with a message that names the problem, and the server goes on."""

import json
from typing import Any

import httpx
import pytest

from tests.full_tests.server import Server

Case = tuple[str, dict[str, Any], list[str]]
MAX_LEN = 4096


def structured(**constraint: Any) -> dict[str, Any]:
    return dict(prompt="hi", structured_outputs=constraint)


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return dict(messages=[dict(role="user", content=content)], **more)


# What is wrong, the body, and words that the message must contain.
COMPLETIONS: list[Case] = [
    ("over-long text", dict(prompt="word " * 10_000), ["maximum context length", str(MAX_LEN)]),
    ("id out of range", dict(prompt=[5, 400, 3]), ["400", "vocabulary"]),
    ("huge id", dict(prompt=[5, 2**63]), [str(2**63), "vocabulary"]),
    ("logit_bias", dict(prompt="hi", logit_bias={"100000": 1}), ["logit_bias", "100000", "vocab"]),
    ("allowed ids", dict(prompt="hi", allowed_token_ids=[100_000]), ["allowed_token_ids", "vocab"]),
    ("long bad word", dict(prompt="hi", bad_words=["x" * 20_000]), ["bad_words", "20000 characters", "16384"]),
    ("bad word of many tokens", dict(prompt="hi", bad_words=["x7" * 1000]), ["bad_words", "tokens", "1024"]),
    ("impossible range", structured(json=dict(type="integer", minimum=5, maximum=1)), ["minimum", "maximum"]),
    ("contradiction", structured(json=dict(allOf=[dict(type="integer"), dict(type="string")])), ["schema"]),
    ("10 MB of text", dict(prompt="a " * 5_000_000), ["maximum context length"]),
]
NONSENSE = dict(type="json_schema", json_schema=dict(name="x", schema=dict(type="nonsense")))
CHATS: list[Case] = [
    ("impossible schema", chat("hi", response_format=NONSENSE), ["nonsense"]),
    ("10 MB of chat", chat("x" * 10_000_000), ["maximum context length"]),
]
CASES = [("/v1/completions", *case) for case in COMPLETIONS] + [("/v1/chat/completions", *case) for case in CHATS]


def check_alive(server: Server) -> None:
    server.wait_idle()
    assert server.complete(prompt="hi", max_tokens=2)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    "other", [dict(allowed_token_ids=[0]), dict(stop_token_ids=[*range(400)]), dict(bad_words=["a"])]
)
def test_request_that_no_token_satisfies_ends(other: dict[str, Any], server: Server) -> None:
    """The server answers as vLLM does, with an error that names no reason, and goes on."""
    response = server.client.post("/v1/completions", json=dict(model="tiny") | structured(choice=["a"]) | other)
    assert response.status_code == 500, response.text
    check_alive(server)


@pytest.mark.parametrize(("path", "name", "body", "words"), CASES, ids=[case[1] for case in CASES])
def test_bad_request_is_refused(path: str, name: str, body: dict[str, Any], words: list[str], server: Server) -> None:
    check_error(server.client.post(path, json=dict(model="tiny") | body), words)
    check_alive(server)


def check_error(response: httpx.Response, words: list[str]) -> None:
    assert 400 <= response.status_code < 500, response.text[:500]
    error = response.json()["error"]
    assert error["code"] == response.status_code
    assert error["type"]
    missing = [word for word in words if word.lower() not in (error["message"] + str(error["param"])).lower()]
    assert not missing, f"{missing} not in: {error['message'][:500]}"
    assert len(error["message"]) < 20_000, "the message repeats the input"


@pytest.mark.parametrize("stream", [True, False], ids=["mid-stream", "waiting"])
def test_request_of_a_client_that_disconnects_is_dropped(stream: bool, server: Server) -> None:
    length = MAX_LEN - 100
    body = dict(model="tiny", prompt="hi", max_tokens=length, temperature=0, ignore_eos=True, stream=stream)
    before = server.metric("vllm:generation_tokens_total")
    if stream:
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            assert json.loads(next(response.iter_lines()).removeprefix("data: "))["choices"]
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/completions", json=body, timeout=0.3)
    check_alive(server)
    assert server.metric("vllm:generation_tokens_total") - before < length
