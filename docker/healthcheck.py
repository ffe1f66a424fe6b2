"""Exit status 0 when the server in this container is healthy: the HEALTHCHECK of all images.

With --complete its engine has to answer a completion of one token besides, which a model that only embeds cannot.

HEALTH_URL says where to ask; set it together with another --port. VLLM_API_KEY is sent along. A proxy that the
container was given is not used.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urljoin

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, timeout: float, body: dict[str, Any] | None = None) -> bytes:
    """An answer with another status than 2xx is an error."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('VLLM_API_KEY', '')}"}
    data = None if body is None else json.dumps(body).encode()
    with DIRECT.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        content: bytes = answer.read()
        return content


def main() -> int:
    url = os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/health")
    try:
        ask(url, timeout=8)
        if "--complete" in sys.argv[1:]:
            model = json.loads(ask(urljoin(url, "/v1/models"), timeout=8))["data"][0]["id"]
            ask(urljoin(url, "/v1/completions"), timeout=25, body={"model": model, "prompt": "a", "max_tokens": 1})
    except (OSError, urllib.error.URLError) as error:
        print(f"{url}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
