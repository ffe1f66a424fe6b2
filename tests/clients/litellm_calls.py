"""LiteLLM: python tests/clients/litellm_calls.py http://127.0.0.1:8000/v1

Prints one JSON object with the client's version and what each call returned; tests/full_tests/test_clients.py compares.
"""

import asyncio
import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one from the network

import litellm
from openai_calls import OPTIONS, TOOLS


def main() -> None:
    options: dict[str, Any] = {**OPTIONS, "model": "hosted_vllm/tiny", "api_base": sys.argv[1], "api_key": "none"}

    async def streamed() -> str:
        stream = await litellm.acompletion(**options, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    def tool_call() -> tuple[str, Any]:
        # With hosted_vllm/ LiteLLM removes "strict", and with it the schema.
        (call,) = litellm.completion(**options | TOOLS | {"model": "openai/tiny"}).choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    found = {
        "chat": litellm.completion(**options).choices[0].message.content,
        "chat, streamed": "".join(
            chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)
        ),
        "chat, async streamed": asyncio.run(streamed()),
        "tool call": tool_call(),
    }
    print(json.dumps({"version": version("litellm"), "calls": found}))


if __name__ == "__main__":
    main()
