"""`gaudi-spec top` and `gaudi-spec chat` on a running server that drafts."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full_tests.server import Server, end_with_parent
from tests.pages import SERVER_ADDRESS, commands_for
from tests.support.processes import ROOT
from vllm_gaudi_spec.tools import chat
from vllm_gaudi_spec.tools import server as tools

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PAGE = ROOT / "docs" / "reference" / "command_line.md"
TOKENS = 150


@pytest.fixture(scope="module")
def drafting(looping_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("live") / "log.txt"
    with Server(looping_llama, log, "--max-num-seqs", "4", "--speculative-config", json.dumps(NGRAM)) as server:
        yield server


def here(command: str, server: Server) -> str:
    ours = f"{shlex.quote(sys.executable)} -m vllm_gaudi_spec.tools.cli"
    return command.replace(SERVER_ADDRESS, f"127.0.0.1:{server.port}").replace(".venv/bin/gaudi-spec", ours)


def run(command: str, server: Server, folder: Path, message: str | None = None) -> str:
    done = subprocess.run(
        shlex.split(here(command, server)),
        cwd=folder,
        input=message,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=end_with_parent,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def answer(server: Server) -> None:
    server.complete(prompt="The quick brown", max_tokens=TOKENS, temperature=0, ignore_eos=True)


def test_top_shows_the_server_metrics(drafting: Server, tmp_path: Path) -> None:
    answer(drafting)
    drafting.wait_idle()
    recorded = set(re.findall(r"(?m)^\w+:\w+", (ROOT / "tests" / "support" / "metrics.txt").read_text()))
    exported = set(re.findall(r"(?m)^\w+:\w+", drafting.client.get("/metrics").text))
    assert recorded <= exported, "record it again"
    live, once, as_json = commands_for("tests/full_tests/test_live.py::test_top_shows_the_server_metrics", PAGE)
    lines = run(once, drafting, tmp_path).splitlines()
    table = {line.split("  ")[0]: line.split() for line in lines[3:]}
    assert table["tokens/s"][1] == "0.0"
    assert int(table["tokens/s"][-3].replace(",", "")) == drafting.metric("vllm:generation_tokens_total")
    for title in ("acceptance rate", "k in use", "without drafts", "late compiles", "KV cache in use", "drafter"):
        assert title in table
    address = f"http://127.0.0.1:{drafting.port}"
    # In a pipe, without a terminal, it is the same.
    assert run(f"{live} {address}", drafting, tmp_path).splitlines()[3:] == lines[3:]
    run(f"{as_json.replace('top', f'top {address}')}", drafting, tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    accepted, drafted = (drafting.metric(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("accepted", "draft"))
    assert figures["acceptance rate"] == {"now": None, "since_start": accepted / drafted}
    rows = figures["k in use"]["since_start"]
    assert sum(rows.values()) == pytest.approx(1)
    assert sum(figures["without drafts"]["since_start"].values()) == pytest.approx(rows["0"])
    assert figures["late compiles"]["since_start"] == 0


def test_chat_shows_accepted_drafts(drafting: Server, tmp_path: Path) -> None:
    """All drafts that the server counted are shown, but for a last token. Steps of a tiny model are faster than their
    stream: where some come together, more than those are green or unknown."""
    typed, piped = commands_for("tests/full_tests/test_live.py::test_chat_shows_accepted_drafts", PAGE)
    for command in (typed, piped.rpartition("| ")[2]):
        plain = run(f"{command} --max-tokens 40", drafting, tmp_path, "Who are you?\n")
        assert plain.strip()
        assert plain.endswith("\n")
        assert "\x1b" not in plain
    server = tools.Server(f"http://127.0.0.1:{drafting.port}")
    k, _ = chat.read_counts(server)
    assert k == 3
    options = dict(model="tiny", temperature=0, max_tokens=TOKENS)
    answer = chat.Conversation(server, k, options).ask("Who are you?", lambda piece: None)
    assert answer.num_accepted is not None
    assert 0 < answer.num_accepted <= answer.num_drafts + answer.num_unknown + 1
    assert answer.num_drafts + answer.num_unknown <= answer.num_tokens
