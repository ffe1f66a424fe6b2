"""The record of a run, and the page made of it."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import DRAFTED, answer, run, task
from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.compare.tasks import TASKS
from vllm_gaudi_spec.tools.report import page, record


def saved(folder: Path, made: dict[str, Any], name: str = "run.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(made))
    return path


# ---- the record ------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGS_DEVICE", "hpu-emulated")
    monkeypatch.setenv("HF_TOKEN", "secret")
    made = run()
    assert record.read(saved(tmp_path, made)) == made
    assert made["environment"]["VGS_DEVICE"] == "hpu-emulated"
    assert "secret" not in json.dumps(made), "a record is passed on: it holds the variables of our table alone"


def broken(**changes: Any) -> dict[str, Any]:
    return {**run(), **changes}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no such file", "No such file"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no record of a run"),
        ('{"tasks": {}}', "is no record of a run"),
        (broken(version=2), "is a record of version 2, and this release reads 3"),
        (broken(tasks={}), "tasks has none"),
        (broken(tasks=[]), "tasks is []"),
        (broken(device={"device": "cpu"}), "device.mode is missing"),
        (broken(command=["a", 3]), "command[1] is 3"),
        (run(task("ngram", -1.0)), "tasks.ngram.tokens_per_s is -1.0"),
        (run(task("ngram", float("nan"))), "tasks.ngram.tokens_per_s is NaN"),
        (run(task("ngram", 1.0, acc_rate="high")), 'tasks.ngram.acc_rate is "high"'),
        (run(task("ngram", 1.0, k=3)), "other numbers of positions than k = 3"),
        (run(task("ngram", 1.0, answers=[{**DRAFTED, "steps": [[1, 2]]}])), "no pairs of tokens and drafts"),
        (run(task("ngram", 1.0, answers=[{**DRAFTED, "steps": [[9, 2]]}])), "other tokens than its steps brought"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_bad_file_is_one_clear_line(
    content: str | dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    if content != "no such file":
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert cli.main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "run.json" in line
    assert re.search(r"; (give|make)", line), f"names no remedy: {line}"
    assert not (tmp_path / "report.html").exists()


# ---- the page --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a reader of the page gets: its texts, its tables, and the elements that could load or run something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.marked: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.texts.append(data)
        if "mark" in self._open:
            self.marked.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def rendered(*runs: dict[str, Any]) -> Page:
    return Page(page.render([page.Run(f"run{number}.json", made) for number, made in enumerate(runs or (run(),), 1)]))


def test_the_page_shows_the_speedup() -> None:
    text = rendered().text
    assert "ngram: speedup 1.50 over no speculation, 60.0 tokens/s against 40.0." in text
    assert "1.50 × 1.25 to 2.00" in text, "the quartiles stand below"
    assert "Each prompt was run 2 times, by all tasks in turns within seconds, in alternating order" in text
    assert "65 % 13 of 20" in text
    assert "Device cpu, mode eager. 1 prompt of 4 tokens, concurrency 1, temperature 0." in text
    assert "gaudi-spec demo --task compare" in text
    assert "2.30 2.30 all steps" in text
    # The rate of each position in ten steps with drafts, and the steps by number of accepted drafts.
    assert "1 80 % 2 50 %" in text
    assert "0 2 1 3 2 5" in text


def test_drafted_tokens_are_marked() -> None:
    found = rendered()
    assert found.marked == ["Marked and underlined", " was a"]
    assert "2 of 4 tokens were drafts; 2 steps" in found.text


def test_steps_of_every_kind_make_the_whole_text() -> None:
    cut_off = answer("p", ("one", 0), ("two three", 2), ("four", 0), ("five", 0), ("six seven", 1))
    assert page._parts(cut_off) == [(" one", 0), (" two three", 2), (" four five", 0), (" six", 1), (" seven", 0)]


def test_a_run_without_speedup() -> None:
    text = rendered(run(task("baseline", 40.0, k=0), task("ngram", 30.0))).text
    assert "No speedup here: ngram came nearest with 30.0 tokens/s, against 40.0 without speculation." in text
    alone = rendered(run(task("ngram", 30.0))).text
    assert "ngram: 30.0 tokens/s." in alone
    assert "speedup" not in alone
    assert "in turns" not in alone


def test_tasks_that_ran_one_after_the_other() -> None:
    made = run()
    made["measurement"] = {"turns": 1, "why_one_by_one": "a card belongs to one process"}
    text = rendered(made).text
    assert "was run once, one task after the other, because a card belongs to one process: a busy machine moves" in text
    assert "alternating" not in text


def test_a_compile_after_warm_up_stands_out() -> None:
    late = task("ngram", 60.0, graphs={"warmup": 7, "after_warmup": 2}, compiled_after_warmup=3)
    text = rendered(run(late)).text
    assert "2 – should be 0" in text
    assert "3 – should be 0" in text


def test_several_runs_are_compared() -> None:
    slow, fast = run(), run(task("baseline", 80.0, k=0), task("ngram", 200.0), device="hpu-emulated")
    text = rendered(slow, fast).text
    assert "2 runs" in text
    assert (
        "run1.json ngram drafts what came after the same words before drafter 60.0 tokens/s 1.50 × 1.25 to 2.00" in text
    )
    assert (
        "run2.json ngram drafts what came after the same words before drafter 200.0 tokens/s 2.50 × 2.25 to 3.00"
        in text
    )
    assert "target: ngram: speedup 2.50" in text


NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\ud800\u202e\0</style></title>"


def test_texts_of_models_and_files_stay_text(tmp_path: Path) -> None:
    """Everywhere: prompts, answers, names of models, tasks, files and commands."""
    words = [NASTY, f" {NASTY}"]
    hostile = {"prompt": NASTY, "pieces": words, "steps": [[2, 1]]}
    made = run(task(NASTY, 2.0, answers=[hostile], draft_model=NASTY), device=NASTY, model=NASTY)
    made |= {"command": [NASTY], "versions": {NASTY: NASTY}, "environment": {"VGS_DEVICE": NASTY}, "made": NASTY}
    path = saved(tmp_path, made, "<b>.json")
    html = tmp_path / "report.html"
    assert cli.main(["report", str(path), str(path), "-o", str(html)]) == 0
    written = html.read_bytes().decode()
    found, harmless = Page(written), rendered(run(), run())
    assert set(found.tags) == set(harmless.tags)
    assert not {"script", "img", "iframe", "link", "object"} & set(found.tags)
    assert {name for name, _ in found.attributes} == {name for name, _ in harmless.attributes}
    assert found.text.count("<script>alert(1)</script>") > 10
    assert "<script" not in written


def test_the_page_loads_nothing() -> None:
    html = page.render([page.Run("run.json", run())])
    found = Page(html)
    assert "script" not in found.tags
    assert not {name for name, _ in found.attributes} & {"src", "href", "style", "onclick", "onload"}
    assert "url(" not in html
    assert "@import" not in html
    policy = next(value for _, value in found.attributes if value.startswith("default-src"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


def test_json_in_place_of_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, html = saved(tmp_path, run()), tmp_path / "report.html"
    assert cli.main(["report", str(path), "-o", str(html), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert [one["ratio"] for one in written["runs"][0]["tasks"]] == [1.0, 1.5]
    assert html.stat().st_size > 5000
    assert cli.main(["report", str(path), "-o", str(html)]) == 0
    assert capsys.readouterr().out == f"report: {html}\n"
    assert cli.main(["report", str(path), "-o", "/no/such/report.html"]) == 2
    assert "there is no folder /no/such for --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [("--json", "write --json=FILE, or put --json last"), ("-o", "name another file")],
)
def test_a_record_is_not_overwritten(
    option: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json BEFORE AFTER` reads as one run, and a file to write."""
    before, after = saved(tmp_path, run(), "before.json"), saved(tmp_path, run(), "after.json")
    written = before.read_text()
    page_at = ["-o", str(tmp_path / "page.html")] if option == "--json" else []
    assert cli.main(["report", option, str(before), str(after), *page_at]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"would overwrite the record {before}; {words}" in line
    assert before.read_text() == written
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": {"X; touch bad #": "1"}}, "which is no variable's name"),
        ({"settings": run()["settings"] | {"osl": 10**400}}, "settings.osl is 1000"),
    ],
    ids=["name", "number"],
)
def test_records_from_elsewhere(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(saved(tmp_path, run() | changes)), "-o", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_each_task_is_explained() -> None:
    assert set(TASKS) <= set(page._DESCRIPTIONS)


def test_a_pipe_to_write_into_is_not_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a record is about to be overwritten is asked of files: `gaudi-spec report RUN.json --json >(...)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(Path, "read_text", lambda path: pytest.fail("this would wait for ever"))
    assert not record.is_record(pipe)


# ---- latency and a step ----------------------------------------------------------------------------------


def test_latencies_have_their_spread_over_turns() -> None:
    text = rendered().text
    assert "TTFT, ms (bars: 0 to 175)" in text, "the largest upper quartile"
    assert "150.0 ms TTFT 125.0 to 175.0" in text
    assert "30.0 ms TPOT 25.0 to 35.0" in text
    assert "40.0 ms ITL 40.0 to 40.0" in text


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    alone = [[{"ttft": 0.1, "tpot": None, "itl": None}]]
    text = rendered(run(task("baseline", 40.0, k=0, latencies=alone))).text
    assert "100.0 ms TTFT" in text
    assert "ms TPOT" not in text


def test_a_step_is_drawn_part_after_part() -> None:
    html = page.render([page.Run("run.json", run(task("ngram", 60.0)))])
    assert "One decode step, 1 request of 3 tokens: 10.0 ms<" in html
    rows = re.findall(r'class="part">(\w+)</th>.*?</svg><span class="figure">([\d.]+)<', html)
    assert rows == [
        *(("prepare", "1.5"), ("forward", "5.0"), ("verify", "1.0"), ("draft", "1.0"), ("report", "0.5")),
        ("engine", "1.0"),
    ]
    assert '<rect class="fill" x="10.00" width="50.00" height="8"/>' in html, "the forward begins after 1 ms"


def test_a_run_without_a_decode_step() -> None:
    assert "One decode step, " not in page.render([page.Run("run.json", run(task("ngram", 60.0, step=None)))])
