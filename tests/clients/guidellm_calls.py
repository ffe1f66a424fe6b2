"""guidellm: python tests/clients/guidellm_calls.py http://127.0.0.1:8000/v1

Prints one JSON object with the client's version and what each call returned; tests/full_tests/test_clients.py compares.
Prompts of a file need no tokenizer, as synthetic ones would.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS = ("The quick", "Once upon a time", "The capital of France is")


def load(path: str, folder: Path) -> list[dict[str, Any]]:
    """One turn over the prompts, two at a time: of each what was asked, the text and its number of tokens."""
    prompts, report = folder / "prompts.jsonl", folder / "report.json"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    options: dict[str, dict[str, Any]] = {
        "backend": {
            "kind": "openai_http",
            "target": sys.argv[1],
            "request_format": path,
            "max_tokens": 40,
            "extras": {"body": {"temperature": 0}},
        },
        "profile": {"kind": "concurrent", "streams": 2},
        "constraint": {"kind": "max_requests", "count": len(PROMPTS)},
        "data": {"kind": "json_file", "path": str(prompts)},
        "output": {"kind": "json", "path": str(report)},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", json.dumps(value))]
    command = [str(Path(sys.executable).with_name("guidellm")), "run", *words, "--disable-console"]
    subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
    (found,) = json.loads(report.read_text())["benchmarks"]
    return [
        {
            "body": json.loads(one["request_args"])["body"],
            "text": one["output"],
            "tokens": one["output_metrics"]["text_tokens"],
        }
        for one in found["requests"]["successful"]
    ]


def main() -> None:
    calls = {}
    for name, path in (("completions, streamed", "/v1/completions"), ("chat, streamed", "/v1/chat/completions")):
        with tempfile.TemporaryDirectory() as folder:
            calls[name] = load(path, Path(folder))
    print(json.dumps({"version": version("guidellm"), "calls": calls}))


if __name__ == "__main__":
    main()
