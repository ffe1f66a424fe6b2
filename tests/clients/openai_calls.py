"""OpenAI's client: python tests/clients/openai_calls.py http://127.0.0.1:8000/v1

Prints one JSON object with the client's version and what each call returned; tests/full_tests/test_clients.py compares.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from openai import AsyncOpenAI, NotFoundError, OpenAI

QUESTION: list[Any] = [{"role": "user", "content": "Who are you?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Only a strict tool's schema is in vLLM's grammar.
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}
TOOLS: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "max_tokens": 200,
}


def calls(client: OpenAI, async_client: AsyncOpenAI) -> dict[str, Callable[[], Any]]:
    def chat(**more: Any) -> Any:
        return client.chat.completions.create(**OPTIONS | more)

    def streamed() -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True))

    async def in_parallel() -> list[str]:
        one = async_client.chat.completions.create(**OPTIONS)
        other = async_client.chat.completions.create(**OPTIONS, stream=True)
        answer, stream = await asyncio.gather(one, other)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return [answer.choices[0].message.content or "", text]

    def logprobs() -> dict[str, Any]:
        (choice,) = chat(logprobs=True, top_logprobs=2).choices
        entries = choice.logprobs.content
        return {"tokens": len(entries), "the best": all(one.token == one.top_logprobs[0].token for one in entries)}

    def structured() -> str:
        schema = {"name": "answer", "schema": SCHEMA}
        return chat(response_format={"type": "json_schema", "json_schema": schema}).choices[0].message.content

    def tool_call() -> tuple[str, str]:
        (call,) = chat(**TOOLS).choices[0].message.tool_calls
        return call.function.name, call.function.arguments

    def tool_call_streamed() -> tuple[str, str]:
        deltas = [chunk.choices[0].delta for chunk in chat(**TOOLS, stream=True)]
        parts = [call.function for delta in deltas for call in delta.tool_calls or ()]
        return tuple("".join(getattr(part, field) or "" for part in parts) for field in ("name", "arguments"))

    def unknown_model() -> str:
        try:
            client.chat.completions.create(**OPTIONS | {"model": "no-such-model"})
        except NotFoundError as error:
            return error.message
        raise AssertionError("a model that is not there answered")

    return {
        "models": lambda: [model.id for model in client.models.list()],
        "chat": lambda: chat().choices[0].message.content,
        "chat, streamed": streamed,
        "chat, async and async streamed": lambda: asyncio.run(in_parallel()),
        "chat with logprobs": logprobs,
        "usage of a stream": lambda: (
            list(chat(stream=True, stream_options={"include_usage": True}))[-1].usage.completion_tokens
        ),
        "stop string": lambda: chat(stop=[" "]).choices[0].message.content,
        "n = 2 with a seed": lambda: [
            choice.message.content
            for choice in client.chat.completions.create(**OPTIONS | {"temperature": 1.0, "seed": 7, "n": 2}).choices
        ],
        "JSON schema": structured,
        "tool call": tool_call,
        "tool call, streamed": tool_call_streamed,
        "completion": lambda: (
            client.completions.create(model="tiny", prompt="The quick", max_tokens=40, temperature=0).choices[0].text
        ),
        "responses": lambda: (
            client.responses.create(model="tiny", input="Who are you?", max_output_tokens=40, temperature=0).output_text
        ),
        "unknown model": unknown_model,
    }


def main() -> None:
    address = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0}
    found = {name: call() for name, call in calls(OpenAI(**address), AsyncOpenAI(**address)).items()}
    print(json.dumps({"version": version("openai"), "calls": found}))


if __name__ == "__main__":
    main()
