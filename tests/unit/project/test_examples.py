"""The examples as text; tests/full_tests/test_examples.py runs them."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import examples.custom_drafter
from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples"
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_service_builds_a_stage_and_listens_locally(name: str) -> None:
    service = COMPOSE["services"][name]
    assert (EXAMPLES / service["build"]["context"] / "Dockerfile").samefile(ROOT / "Dockerfile")
    stages = re.findall(r"(?m)^FROM .* AS (\S+)", (ROOT / "Dockerfile").read_text())
    assert service["build"]["target"] in stages
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert all(volume.partition(":")[0] in COMPOSE["volumes"] for volume in service["volumes"])


@pytest.mark.parametrize(
    ("model", "words"), [("", ["demo", "--max-model-len", "2048"]), ("m/x", ["m/x", "--max-model-len", "2048"])]
)
def test_container_runs_the_servers_command(model: str, words: list[str]) -> None:
    """As Compose hands it to bash: two dollars are one."""
    for service in COMPOSE["services"].values():
        assert service["entrypoint"] == ["bash", "-c"]
        (line,) = service["command"]
        line = line.replace("$$", "$").removeprefix("exec ")
        script = f'vllm() {{ printf "%s\\n" "$@"; }}; python() {{ echo demo; }}; {line}'
        done = subprocess.run(["bash", "-c", script], env={"MODEL": model}, capture_output=True, text=True)
        assert done.stdout.splitlines() == ["serve", *words], done.stderr


def test_answer_book_drafts_what_followed_the_last_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Words:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return list(map(int, text.split()))

    (tmp_path / "answers.txt").write_text("1 2 3 4 5 1 2 6")
    monkeypatch.setenv("ANSWERS", str(tmp_path / "answers.txt"))
    monkeypatch.setattr(examples.custom_drafter, "cached_tokenizer_from_config", lambda _: Words())
    speculation = SimpleNamespace(num_speculative_tokens=2)
    book = examples.custom_drafter.AnswerBook(SimpleNamespace(speculative_config=speculation, model_config=None))
    tokens_np = np.array([[9, 2, 3, 0], [1, 2, 0, 0], [7, 8, 9, 0], [5, 0, 0, 0]])
    # The newest place counts, the end of the text yields fewer drafts, and what is not in the text yields none.
    assert book.propose([[3], [2], [9], [5]], np.array([3, 2, 3, 1]), tokens_np) == [[4, 5], [6], [], []]
