"""The record of a run, and the page made of it."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import DRAFTED, answer, run, task
from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.report import page, record


def save(folder: Path, made: dict[str, Any], name: str = "run.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(made))
    return path


def test_a_record_is_read_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGS_DEVICE", "hpu-emulated")
    monkeypatch.setenv("HF_TOKEN", "secret")
    made = run()
    assert record.read(save(tmp_path, made)) == made
    assert made["environment"]["VGS_DEVICE"] == "hpu-emulated"
    assert "secret" not in json.dumps(made), "a record is passed on, so it has documented variables only"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not the record of a run"),
        (run() | {"version": 2}, "version 2"),
        (run() | {"tasks": {}}, "damaged"),
        (run() | {"device": {"device": "cpu"}}, "damaged"),
        (run() | {"command": ["a", 3]}, "damaged"),
        (run() | {"settings": run()["settings"] | {"temperature": 10**400}}, "damaged"),
        (run(task("ngram", 1.0, acc_rate="high")), "damaged"),
        (run(task("ngram", 1.0, k=3, acc_counts=[3])), "damaged"),
        (run(task("ngram", 1.0, answers=[{**DRAFTED, "steps": [[1]]}])), "damaged"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_bad_file_is_one_line_that_names_it(
    content: str | dict[str, Any] | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert cli.main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "run.json" in line
    assert not (tmp_path / "report.html").exists()


def test_a_record_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = save(tmp_path, run(), "before.json"), save(tmp_path, run(), "after.json")
    written = before.read_text()
    assert cli.main(["report", "-o", str(before), str(after)]) == 2
    assert f"would overwrite the record {before}" in capsys.readouterr().err
    assert before.read_text() == written
    assert cli.main(["report", str(before), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'page.html'}\n"


def render(*runs: dict[str, Any]) -> str:
    return page.render([page.Run(f"run{number}.json", made) for number, made in enumerate(runs or (run(),), 1)])


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def tags_of(html: str) -> set[str]:
    return set(re.findall(r"<(\w+)", html))


def test_the_page_has_the_figures_of_the_run() -> None:
    text = text_of(render())
    for figure in (
        "speedup 1.50, 60.0 tokens/s",
        "1.50 × 1.25 to 2.00",
        "65 % 13 of 20",
        "2.30 2.30 all steps",
        "0 2 1 80 % 3 2 50 % 5",  # acceptance by position, and steps by number of accepted drafts
        "150.0 125.0 to 175.0",  # TTFT
        "gaudi-spec demo --task compare",
        record.describe_measurement(run()["measurement"]),
    ):
        assert figure in text


def test_accepted_drafts_are_marked() -> None:
    html = render()
    assert '<mark title="2 accepted in one step"> was a</mark>' in html
    assert "2 of 4 tokens were drafts; 2 steps" in text_of(html)
    cut_off = answer("p", ("one", 0), ("two three", 2), ("four", 0), ("five", 0), ("six seven", 1))
    assert page._split_text(cut_off) == [(" one", 0), (" two three", 2), (" four five", 0), (" six", 1), (" seven", 0)]


NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\ud800\u202e\0</style></title>"


def test_texts_of_models_and_files_stay_text(tmp_path: Path) -> None:
    """Everywhere: prompts, answers, names of models, tasks, files and commands."""
    hostile = {"prompt": NASTY, "pieces": [NASTY, f" {NASTY}"], "steps": [[2, 1]]}
    made = run(task(NASTY, 2.0, answers=[hostile], draft_model=NASTY), device=NASTY, model=NASTY)
    made |= {"command": [NASTY], "versions": {NASTY: NASTY}, "environment": {"VGS_DEVICE": NASTY}, "made": NASTY}
    path, html = save(tmp_path, made, "<b>.json"), tmp_path / "report.html"
    assert cli.main(["report", str(path), str(path), "-o", str(html)]) == 0
    written = html.read_bytes().decode()
    assert tags_of(written) == tags_of(render(run(), run()))
    assert written.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10
    assert 'alert(2)&gt;"' not in written, "a quote ends an attribute"


def test_the_page_loads_nothing() -> None:
    html = render()
    assert not {"script", "img", "iframe", "link", "object"} & tags_of(html)
    assert not re.search(r" (src|href|style|onclick|onload)=", html)
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'; style-src 'sha256-" in html
