"""`gaudi-spec top`: figures of recorded metrics, and what is shown of them.
tests/full_tests/test_live.py asks a server."""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_server import Answers, answering
from vllm_gaudi_spec.tools import cli, top
from vllm_gaudi_spec.tools.server import find_base
from vllm_gaudi_spec.tools.top import History, Reading, Row

RECORDED = (Path(__file__).parents[2] / "support" / "metrics.txt").read_text()
"""A server of the demo model with drafts (k = 3), after three answers; histograms without their buckets."""


def changed(text: str = RECORDED, **values: float) -> str:
    """The text with other values, by the end of a series' name and the value of its last label."""
    for name, value in values.items():
        series, _, label = name.partition("__")
        last = rf'"{label}"' if label else ""
        text, count = re.subn(rf"(?m)^(\S*{series}\{{.*{last}\}}) \S+$", rf"\1 {value}", text)
        assert count == 1, f"{name} is {count} series"
    return text


LATER = changed(
    **dict(generation_tokens_total=127, prompt_tokens_total=347, num_drafts_total=61, num_draft_tokens_total=183),
    **dict(num_accepted_tokens_total=63, per_pos_total__0=33, per_pos_total__1=20, per_pos_total__2=10),
    **{":steps_total": 127, "host_syncs_total": 125, ":rows_total__3": 61},
    **{":rows_total__0": 10},
    **dict(without_drafts_total__nothing=8, without_drafts_total__ending=2),
    **dict(num_requests_running=4, num_requests_waiting=2, kv_cache_usage_perc=0.125),
    **dict(first_token_seconds_count=13, first_token_seconds_sum=10.269676923751831),
)


def rows(*texts: str, seconds: float = 4.0) -> dict[str, Row]:
    history = History(10.0)
    for number, text in enumerate(texts):
        history.add(Reading(text, number * seconds))
    return {row.title: row for row in history.make_rows()}


# ---- figures ---------------------------------------------------------------------------------------------


def test_figures_between_two_readings() -> None:
    found = {title: row.now for title, row in rows(RECORDED, LATER).items()}
    assert found["tokens/s"] == "25.0"
    assert found["prompt tokens/s"] == "50.0"
    assert (found["requests running"], found["requests waiting"]) == ("4", "2")
    assert found["KV cache in use"] == "12.5%"
    assert found["TTFT"] == "200.0 ms"
    assert found["TPOT"] == "–", "no request has ended"
    assert found["steps/s"] == "25.0"
    assert found["device-to-host syncs/step"] == "1.00"
    assert found["acceptance rate"] == "50.0%"
    assert found["mean acceptance length"] == "2.50"
    assert found["acceptance by position"] == "75% 50% 25%"
    assert found["k in use"] == "0: 20%, 3: 80%"
    assert found["without drafts"] == "ending: 4%, nothing: 16%"
    assert found["drafter"] == "on"
    assert "audits" not in found


def test_sums_are_over_engines() -> None:
    second = changed(kv_cache_usage_perc=0.05, generation_tokens_total=127).replace('engine="0"', 'engine="1"')
    found = rows(LATER + second, LATER + second)
    assert found["tokens/s"].since_start == "254 in all"
    assert found["k in use"].since_start == "0: 11%, 3: 89%", "10 and 61 of the one, 21 of the other"
    assert found["KV cache in use"].now == "12.5%", "the fullest engine"


def test_a_server_that_starts_again_has_no_negative_rates() -> None:
    found = rows(RECORDED, LATER, RECORDED)
    assert found["tokens/s"].now == "–", "one reading has no rate"
    assert rows(LATER, RECORDED, LATER)["tokens/s"].now == "25.0"


# ---- addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "", "http://a:0", "http://a:99999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a server"):
        find_base(url)


# ---- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """The server grows from one reading to the next."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hostile = (text.replace('"nothing"', '"\x1b]0;nothing"') for text in (RECORDED, LATER))
    texts: Iterator[str] = iter(hostile)
    return {"/metrics": lambda body: (200, next(texts))}


def test_json(answers: Answers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top, "show_live", lambda *arguments: pytest.fail("it was to print once"))
    with answering(answers) as address:
        assert cli.main(["top", address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["server"] == address
    assert found["figures"]["acceptance rate"] == {"now": 0.5, "since_start": 63 / 183}
    assert found["figures"]["acceptance by position"]["now"] == {"0": 0.75, "1": 0.5, "2": 0.25}
    assert found["figures"]["late compiles"] == {"now": 0, "since_start": 0}


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (404, '{"detail":"Not Found"}', "/metrics: Not Found"),
        (500, "broken", "/metrics: 500 Internal Server Error"),
        (401, '{"error":"Unauthorized"}', "needs an API key"),
        (200, "<html></html>", "is not in Prometheus' format"),
        (200, "go_threads 3", "has no series of vLLM"),
        (200, re.sub(r"(?m)^.*gaudi_spec.*$", "", RECORDED), "without this plugin"),
    ],
)
def test_servers_that_are_not_ours(status: int, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"/metrics": lambda body: (status, text)}) as address:
        assert cli.main(["top", address, "--once"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gaudi-spec top: error: {address}")
    assert words in line
