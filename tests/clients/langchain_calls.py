"""LangChain: python tests/clients/langchain_calls.py http://127.0.0.1:8000/v1

Prints one JSON object with the client's version and what each call returned; tests/full_tests/test_clients.py compares.
"""

import asyncio
import json
import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI
from openai_calls import TOOL


def main() -> None:
    model = ChatOpenAI(model="tiny", base_url=sys.argv[1], api_key="none", max_tokens=40, temperature=0, max_retries=0)
    tools = model.bind_tools([TOOL], tool_choice="weather", max_tokens=200)

    def tool_call() -> tuple[str, object]:
        (call,) = tools.invoke("Who are you?").tool_calls
        return call["name"], call["args"]

    found = {
        "chat": model.invoke("Who are you?").content,
        "chat, streamed": "".join(str(chunk.content) for chunk in model.stream("Who are you?")),
        "chat, async": asyncio.run(model.ainvoke("Who are you?")).content,
        "tool call": tool_call(),
        "batch": [answer.content for answer in model.batch(["Who are you?"] * 3)],
    }
    print(json.dumps({"version": version("langchain-openai"), "calls": found}))


if __name__ == "__main__":
    main()
