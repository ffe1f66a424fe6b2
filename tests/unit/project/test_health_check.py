"""docker/healthcheck.py, which the images and the manifests run."""

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.http_server import answering
from tests.support.processes import ROOT


@pytest.mark.parametrize(
    ("completion", "words", "code"), [(200, ["--complete"], 0), (500, ["--complete"], 1), (500, [], 0)]
)
def test_health_check_asks_for_a_completion(completion: int, words: list[str], code: int) -> None:
    """It sends the server's key along: an engine may be stuck while /health answers."""

    def complete(headers: Any) -> tuple[int, str]:
        return completion if headers["Authorization"] == "Bearer secret" else 401, "{}"

    found = {"/health": lambda _: (200, ""), "/v1/models": lambda _: (200, '{"data": [{"id": "tiny"}]}')}
    with answering(found, {"/v1/completions": complete}) as address:
        variables = os.environ | {"HEALTH_URL": f"{address}/health", "VLLM_API_KEY": "secret"}
        command = [sys.executable, ROOT / "docker" / "healthcheck.py", *words]
        assert subprocess.run(command, env=variables, check=False).returncode == code
