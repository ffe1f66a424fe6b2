"""The picture of a race: every character of the answer, in its step, and what was recorded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import race

from vllm_gaudi_spec.tools.live.answers import DRAFT, TARGET, Piece

SVG = "{http://www.w3.org/2000/svg}"
STEPS = [
    race.Step(0.5, [Piece("A dog & its ", TARGET)]),
    race.Step(1.0, [Piece("garden, in which it finds <a> big ", DRAFT), Piece("key.\n\nIt ", TARGET)]),
    race.Step(2.0, [Piece("is old", TARGET)]),
]
PLAIN = race.Recorded([race.Step(0.1 * i, [Piece(c, TARGET)]) for i, c in enumerate("two words ", 1)], 9, 0)
DRAFTED = race.Recorded(STEPS, 12, 7)  # two steps came in one event


def test_lines_are_wrapped_at_spaces_and_lose_nothing() -> None:
    found = ["".join(character.text for character in line) for line in race.lines(STEPS)]
    assert found == ["A dog & its garden, in which it finds <a> big ", "key.", "", "It is old"]


def test_a_word_without_an_end_is_cut() -> None:
    found = race.lines([race.Step(1.0, [Piece("x" * (2 * race.CHARACTERS + 3), TARGET)])])
    assert [len(line) for line in found] == [race.CHARACTERS, race.CHARACTERS, 3]


def test_each_step_is_seen_at_its_time() -> None:
    root = ElementTree.fromstring(race.draw(PLAIN, DRAFTED, "Recorded."))
    spans = [span for span in root.iter(f"{SVG}tspan") if re.search(r"\bq\d", span.attrib["class"])]
    assert "".join(span.text or "" for span in spans[:-1]) == DRAFTED.text.replace("\n", "")
    drafts = [span.text for span in spans if "d" in span.attrib["class"].split()]
    assert drafts == ["garden,", "in", "which", "it", "finds", "<a>", "big"]  # no space between words is underlined
    style = root.findtext(f"{SVG}style", "")
    times = re.findall(r"@keyframes q(\d) \{ 0% \{ fill-opacity: 0 \} ([\d.]+)%", style)
    whole = 2.0 + race.PAUSE_S
    assert [(int(step), float(at)) for step, at in times] == [
        (step, pytest.approx(100 * seconds / whole, abs=0.01)) for step, seconds in enumerate((0.5, 1.0, 2.0))
    ]
    assert f"tspan {{ animation: {whole:.2f}s step-end infinite }}" in style
    assert "12 tokens in 2.0 s: 6 tokens/s, 5 steps" in spans[-1].text
    assert "7 were accepted" in root.findtext(f"{SVG}desc", "")


def test_the_median_is_drawn() -> None:
    assert race.median([DRAFTED, PLAIN, race.Recorded(STEPS[:1], 4, 0)]).seconds == 1.0
