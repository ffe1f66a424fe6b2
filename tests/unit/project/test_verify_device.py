"""`make verify-gaudi` and `make verify-ascend`: the comparison of a card with the emulated one, and its table."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests import verify_device


def counted(compiles: int, **counts: int | None) -> dict[str, object]:
    phase = {"compiles": compiles, "steps": 4, "runner_syncs": 4, "fallbacks": 0, **counts}
    graphs = {"signatures": 5, "unexpected": [], "compiles_until_ready": 7}
    return {"graphs": graphs, "phases": {"mixed": phase, "prompt log-probabilities": phase}, "findings": []}


def card_and_emulated() -> tuple[dict[str, Any], dict[str, Any]]:
    return counted(0, host_syncs=None, kv_bytes_read=None), counted(0, host_syncs=4, kv_bytes_read=200)


def test_comparison_of_card_and_emulation() -> None:
    rows = verify_device.compare(*card_and_emulated())
    conclusions = {row.name: row.conclusion for row in rows}
    assert conclusions["KV bytes read"] == conclusions["device-to-host syncs, all"] == verify_device.NOT_COUNTED
    assert {conclusion for conclusion in conclusions.values() if conclusion != verify_device.NOT_COUNTED} == {"equal"}
    assert verify_device.agrees(rows)


def test_a_difference_that_matters() -> None:
    card, emulated = card_and_emulated()
    card["phases"]["mixed"]["compiles"] = 2
    card["phases"]["mixed"]["steps"] += 1
    rows = {row.name: row for row in verify_device.compare(card, emulated)}
    assert rows["graphs compiled after warm-up"].conclusion == "DIFFERENT"
    assert rows["steps"].conclusion == "different"
    assert not verify_device.agrees(list(rows.values()))


def test_verify_gaudi_runs_in_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's, else that of the card's torch."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    assert verify_device.environment("hpu")["PT_HPU_LAZY_MODE"] == "0"
    monkeypatch.delenv("PT_HPU_LAZY_MODE")
    monkeypatch.setattr(verify_device.devices, "has_card", lambda name: True)
    monkeypatch.setattr(verify_device, "gaudi_has_lazy_mode", lambda: False)
    assert {verify_device.environment(device)["PT_HPU_LAZY_MODE"] for device in ("hpu", "hpu-emulated")} == {"0"}


def checked(title: str, rows: Sequence[verify_device.Row]) -> dict[str, Any]:
    return {
        "title": title,
        "error": None,
        "rows": [{**row.__dict__, "conclusion": row.conclusion} for row in rows],
        "findings": {"card": [], "emulated card": ["2 programs"]},
    }


def test_markdown_for_the_documentation() -> None:
    rows = [
        verify_device.Row("steps", 1200, 1201, must_agree=False),
        verify_device.Row("KV bytes read", None, 5000, must_agree=False),
        verify_device.Row("device-to-host syncs of results per step", 0.9, 0.9, must_agree=True),
    ]
    failed = {"title": "ngram", "error": "graph-check on hpu ended with status 1: no memory"}
    record = {
        "a_card": "a Gaudi",
        "rehearsal": False,
        "machine": {"torch": "2.11", "driver": "1.24"},
        "self_test": {"checks": [{"name": "noise", "status": "failed", "detail": "9 ulp"}]},
        "tests": [{"name": "test_chunks", "result": "passed", "seconds": 12.3}],
        "checks": [checked("draft_model", rows), failed],
        "result": "all agree",
    }
    lines = verify_device.markdown(record).splitlines()
    assert lines[0] == "## Verified on a Gaudi"
    assert "| noise | failed | 9 ulp |" in lines
    assert "| test_chunks | passed | 12 |" in lines
    assert "| steps | 1,200 | 1,201 | different |" in lines
    assert "| KV bytes read |  | 5,000 | not counted on the device |" in lines
    assert "| device-to-host syncs of results per step | 0.9 | 0.9 | equal |" in lines
    assert "graph-check, emulated card: 2 programs" in lines
    assert failed["error"] in lines
    rehearsed = verify_device.markdown(record | {"rehearsal": True})
    assert rehearsed.startswith("## Rehearsal on the emulated card")
    assert "| count | in place of the card | emulated | |" in rehearsed
    assert "graph-check, in place of the card: clean" in rehearsed


@pytest.mark.parametrize("device", verify_device.DEVICES.values(), ids=lambda device: device.name)
def test_without_a_card_it_is_an_error(
    device: verify_device.Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = dataclasses.replace(device, is_available=lambda: False)
    monkeypatch.setitem(verify_device.DEVICES, device.name, without)
    monkeypatch.setattr(sys, "argv", ["verify_device.py", device.name])
    assert verify_device.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: there is no {device.kind} here: verify-{device.name} needs a card")
    assert said.count("\n") == 1
