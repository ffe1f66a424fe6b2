"""`gaudi-spec top` and `gaudi-spec chat` on a running server that drafts."""

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full_tests.server import Server, end_with_parent
from tests.pages import SERVER_ADDRESS, commands_for
from tests.support.processes import ROOT

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


def typed_on_a_terminal(command: str, server: Server, message: str, seconds: float = 120) -> str:
    """All that the terminal shows until the answer's last line, and then to Ctrl-D."""
    ours, theirs = pty.openpty()
    words = shlex.split(here(command, server))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, preexec_fn=end_with_parent
    )
    os.close(theirs)
    os.write(ours, message.encode())
    shown, deadline = b"", time.monotonic() + seconds
    while not re.search(rb"the server counted \d.*> $", shown, re.DOTALL):  # and the next prompt
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        if select.select([ours], [], [], 1)[0]:
            shown += os.read(ours, 1 << 16)
    os.write(ours, b"\x04")
    assert process.wait(timeout=seconds) == 0
    os.close(ours)
    return shown.decode(errors="replace")


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
    plain = run(piped.rpartition("| ")[2] + " --max-tokens 40", drafting, tmp_path, "Who are you?\n")
    assert plain.endswith("\n")
    assert plain.strip()
    assert "\x1b" not in plain
    shown = typed_on_a_terminal(f"{typed} --temperature 0 --max-tokens {TOKENS}", drafting, "Who are you?\n")
    assert "k = 3: " in shown
    found = re.search(
        r"(\d+) tokens, [\d.]+ s, (\d+) shown as accepted drafts(?:, (\d+) unknown)?; the server counted (\d+)", shown
    )
    assert found is not None, shown
    tokens, drafts, unknown, counted = (int(number or 0) for number in found.groups())
    assert tokens > 0
    assert counted > 0
    assert counted <= drafts + unknown + 1
    assert drafts + unknown <= tokens
    assert ("\x1b[32m" in shown.partition("> ")[2]) == (drafts > 0)
