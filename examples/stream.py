"""Send a question to a running server through OpenAI's client and print the answer as it arrives.

make serve                                            in another terminal
.venv/bin/python examples/stream.py ["A question" --url http://127.0.0.1:8000/v1]
"""

import argparse
import sys
import time

from openai import APIConnectionError, OpenAI


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is a draft, and what is it good for?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key="none", max_retries=0)
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        print(f"error: no server answers at {options.url}; start one with `make serve`, or pass --url", file=sys.stderr)
        return 1

    started = time.monotonic()
    first = None
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},  # the usage comes in the last chunk, which has no text
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.monotonic() - started
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage is not None:
            seconds = time.monotonic() - started
            print(f"\n\n{chunk.usage.completion_tokens} tokens in {seconds:.1f} s, the first after {first or 0:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
