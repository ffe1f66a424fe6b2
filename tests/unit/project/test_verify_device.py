"""`make verify-gaudi` and `make verify-ascend` compare the counts of a card with those of the emulated one."""

import sys
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


@pytest.mark.parametrize("device", verify_device.DEVICES.values(), ids=lambda device: device.name)
def test_without_a_card_it_is_an_error(
    device: verify_device.Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_device.device_table, "has_card", lambda card: False)
    monkeypatch.setattr(sys, "argv", ["verify_device.py", device.name])
    assert verify_device.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: there is no {device.kind} here: verify-{device.name} needs a card")
    assert said.count("\n") == 1
