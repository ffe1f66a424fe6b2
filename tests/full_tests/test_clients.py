"""OpenAI's client gets from our server, which drafts, what it answers over HTTP."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI

from tests.full_tests.server import Server
from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

DRAFTS = {"method": "draft_model", "model": str(ROOT / "demo" / "draft-same-vocab"), "num_speculative_tokens": 3}
# A small model would fill JSON with blanks.
COMPACT = ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CITIES = [{"city": "Paris"}, {"city": "Rome"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = dict(
    model="tiny", messages=[dict(role="user", content="Who are you?")], max_tokens=40, temperature=0
)
# Only a strict tool's schema is in vLLM's grammar.
TOOLS: dict[str, Any] = dict(
    tools=[{"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}],
    tool_choice={"type": "function", "function": {"name": "weather"}},
    max_tokens=200,
)


@pytest.fixture(scope="module")
def drafting(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("clients") / "log.txt"
    options = ("--max-num-seqs", "4", "--max-model-len", "1024", *COMPACT, *PARSERS)
    with Server(demo_model, log, *options, "--speculative-config", json.dumps(DRAFTS)) as server:
        yield server


@pytest.fixture(autouse=True)
def drafts_are_accepted(drafting: Server) -> Iterator[None]:
    name = "vllm:spec_decode_num_accepted_tokens_total"
    before = drafting.metric(name)
    yield
    drafting.wait_idle()
    assert drafting.metric(name) > before


@pytest.fixture
def client(drafting: Server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{drafting.port}/v1", api_key="none", max_retries=0)


def test_openai(client: OpenAI, drafting: Server) -> None:
    chat = client.chat.completions.create
    body = {name: value for name, value in OPTIONS.items() if name != "model"}
    expected = drafting.post("/v1/chat/completions", body)
    text, num_tokens = expected["choices"][0]["message"]["content"], expected["usage"]["completion_tokens"]
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert chat(**OPTIONS).choices[0].message.content == text
    *chunks, last = chat(**OPTIONS, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage.completion_tokens == num_tokens
    assert asyncio.run(ask_in_parallel(str(client.base_url))) == [text, text]
    entries = chat(**OPTIONS, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(entries) == num_tokens
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)
    assert chat(**OPTIONS, stop=[" "]).choices[0].message.content == text.partition(" ")[0]
    two = chat(**OPTIONS | dict(temperature=1.0, seed=7, n=2)).choices
    assert two[0].message.content != two[1].message.content
    completed = client.completions.create(model="tiny", prompt="The quick", max_tokens=40, temperature=0)
    plain = drafting.complete(prompt="The quick", max_tokens=40, temperature=0)
    assert completed.choices[0].text == plain["choices"][0]["text"]
    responded = client.responses.create(model="tiny", input="Who are you?", max_output_tokens=40, temperature=0)
    assert responded.output_text == text
    with pytest.raises(NotFoundError, match="no-such-model"):
        chat(**OPTIONS | dict(model="no-such-model"))


async def ask_in_parallel(address: str) -> list[str]:
    chat = AsyncOpenAI(base_url=address, api_key="none", max_retries=0).chat.completions.create
    answer, stream = await asyncio.gather(chat(**OPTIONS), chat(**OPTIONS, stream=True))
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return [answer.choices[0].message.content or "", streamed]


def test_openai_tools_and_schemas(client: OpenAI) -> None:
    chat = client.chat.completions.create
    described = dict(type="json_schema", json_schema=dict(name="answer", schema=SCHEMA))
    assert json.loads(chat(**OPTIONS, response_format=described).choices[0].message.content) in CITIES
    (call,) = chat(**OPTIONS | TOOLS).choices[0].message.tool_calls
    deltas = [chunk.choices[0].delta for chunk in chat(**OPTIONS | TOOLS, stream=True)]
    parts = [one.function for delta in deltas for one in delta.tool_calls or ()]
    streamed = ["".join(getattr(part, field) or "" for part in parts) for field in ("name", "arguments")]
    for name, arguments in ([call.function.name, call.function.arguments], streamed):
        assert name == "weather"
        assert json.loads(arguments) in CITIES
