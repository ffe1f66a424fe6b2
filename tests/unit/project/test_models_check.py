"""The check of `make verify-models` sees what it is for, and lets pass what is no fault."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.models import comparison, formats
from tests.models.canaries import Canaries, Guarded
from tests.models.comparison import Row

REFERENCE: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5, 6]],
    "logprobs": [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]],
    "margins": [[1.0, 1.0, 1e-5], [1.0, 1.0, 1.0]],
    "next": [[{"7": -2.0}, {"7": -2.0}, {"9": -1.00001}], [{"7": -2.0}] * 3],
}
RUNS: dict[str, Any] = {
    "outcome": "runs",
    "tokens": [[1, 2, 3], [4, 5, 6]],
    "logprobs": REFERENCE["logprobs"],
    "accepted": 2,
    "draft": 3,
}
CRASH: dict[str, Any] = {"outcome": "crash", "type": "KeyError", "error": "'layers.0'", "where": "vllm/x.py:1 f"}
REFUSED: dict[str, Any] = {"outcome": "refused", "type": "UnsupportedConfigError", "error": "no; use another"}
FINE: dict[str, Any] = {"outcome": "fine", "error": "fine"}
PROBLEM: dict[str, Any] = {"outcome": "problem", "error": "1 problem"}


def changed(result: dict[str, Any], prompt: int, at: int) -> dict[str, Any]:
    """With another token there."""
    found = copy.deepcopy(result)
    found["tokens"][prompt][at] = 9
    found["logprobs"] = copy.deepcopy(found["logprobs"])
    return found


def row(plain: dict[str, Any], reference: dict[str, Any] | None = REFERENCE, **results: dict[str, Any]) -> Row:
    return comparison.row("a-case", {"plain": plain, **results}, reference, tolerance=0.02)


# ---- answers ---------------------------------------------------------------------------------------------


def test_an_equal_answer_is_no_fault() -> None:
    found = row(RUNS, drafts=RUNS, doctor=FINE, upstream=RUNS)
    assert not found.faults
    assert (found.reference, found.drafts, found.doctor) == ("equal (0e+00)", "equal, 2/3", "fine")


def test_another_token_is_a_wrong_answer() -> None:
    assert row(changed(RUNS, 1, 1)).faults == ["wrong answer"]


def test_of_two_equal_logits_either_may_win() -> None:
    assert not row(changed(RUNS, 0, 2)).faults
    assert row(changed(changed(RUNS, 0, 2), 1, 2)).faults == ["wrong answer"]


def test_no_other_token_wins_a_tie_and_none_with_another_probability() -> None:
    stranger = changed(RUNS, 0, 2)
    stranger["tokens"][0][2] = 8
    assert row(stranger).faults == ["wrong answer"]
    unlikely = changed(RUNS, 0, 2)
    unlikely["logprobs"][0][2] = -3.0
    assert row(unlikely).faults == ["wrong answer"]


def test_canaries_that_guard_nothing_are_a_fault() -> None:
    assert row(RUNS | {"guarded": 0}).faults == ["plain: no KV buffer was guarded"]
    assert not row(RUNS | {"guarded": 1}).faults


@pytest.mark.parametrize("off", [0.1, float("nan")])
def test_equal_tokens_with_other_probabilities_are_a_wrong_answer(off: float) -> None:
    found = copy.deepcopy(RUNS)
    found["logprobs"][1][2] += off
    assert row(found).faults == ["wrong answer"]


def test_what_upstream_answers_alike_is_not_ours() -> None:
    found = row(changed(RUNS, 1, 1), upstream=changed(RUNS, 1, 1))
    assert not found.faults
    assert "exactly as upstream" in found.cause
    assert row(changed(RUNS, 1, 1), upstream=RUNS).faults == ["wrong answer"]


def test_upstream_is_the_reference_where_there_is_no_other() -> None:
    assert not row(RUNS, reference=None, upstream=RUNS).faults
    assert row(RUNS, reference=None, upstream=changed(RUNS, 0, 0)).faults == ["differs from upstream"]


@pytest.mark.parametrize(
    ("graphs", "device", "syncs", "faults"),
    [
        (0, {}, 1.0, []),
        (0, {"compiled_after_warmup": 0}, 0.9, []),
        (2, {}, 1.0, ["2 shapes compiled after warm-up, model drafts"]),
        (0, {"compiled_after_warmup": 1}, 1.0, ["1 shapes compiled after warm-up, model drafts"]),
        (0, {}, 1.25, ["1.25 device-to-host syncs a step, model drafts"]),
    ],
)
def test_what_no_step_may_do_is_a_fault(graphs: int, device: dict[str, int], syncs: float, faults: list[str]) -> None:
    steps = {"graphs": {"after_warmup": graphs}, "device": device, "host_syncs_per_step": syncs}
    assert row(RUNS, **{"model drafts": RUNS | {"steps": steps}}).faults == faults


def test_the_table_has_what_was_compiled_and_the_most_syncs() -> None:
    steps = {"graphs": {"after_warmup": 0}, "device": {"compiled_after_warmup": 0}, "host_syncs_per_step": 1.0}
    drafting = {"graphs": {"after_warmup": 1}, "device": {"compiled_after_warmup": 2}, "host_syncs_per_step": 1.25}
    assert "0, 1.00" in comparison.cells(row(RUNS | {"steps": steps}))
    assert "3, 1.25" in comparison.cells(row(RUNS | {"steps": steps}, drafts=RUNS | {"steps": drafting}))
    assert len(comparison.cells(row(RUNS))) == len(comparison.COLUMNS)


def test_drafts_that_change_the_text_are_a_fault() -> None:
    assert row(RUNS, drafts=changed(RUNS, 0, 1)).faults == ["drafts change the text"]
    assert row(RUNS, **{"model drafts": changed(RUNS, 0, 1)}).faults == ["model drafts change the text"]
    assert not row(RUNS, drafts=changed(RUNS, 0, 2)).faults, "a tie of the reference"
    assert row(RUNS, reference=None, drafts=changed(RUNS, 0, 2)).faults == ["drafts change the text"]
    assert row(RUNS, drafts=CRASH).faults == ["with drafts: crash"]


# ---- errors ----------------------------------------------------------------------------------------------


def test_a_crash_is_a_fault_unless_upstream_ends_alike() -> None:
    assert row(CRASH).faults == ["crash"]
    assert row(CRASH, upstream=RUNS).faults == ["crash"]
    assert row(CRASH, upstream=CRASH | {"error": "another"}).faults == ["crash"]
    assert not row(CRASH, upstream=CRASH, doctor=FINE).faults


def test_a_refusal_is_no_fault_and_has_its_cause_without_the_name() -> None:
    found = row(REFUSED | {"error": "a-case keeps state; use another"}, doctor=PROBLEM, upstream=RUNS)
    assert not found.faults
    assert found.cause == "refused: MODEL keeps state; use another"
    assert any("run on upstream's CPU platform and not on ours" in line for line in comparison.summary([found]))


def test_a_refusal_after_configuration_is_a_fault() -> None:
    assert row(REFUSED | {"outcome": "crash", "late_refusal": True}).faults == ["late refusal"]


@pytest.mark.parametrize(("plain", "doctor"), [(RUNS, PROBLEM), (REFUSED, FINE)])
def test_a_doctor_who_is_wrong_is_a_fault(plain: dict[str, Any], doctor: dict[str, Any]) -> None:
    assert row(plain, doctor=doctor).faults == [f"doctor: {doctor['outcome']}"]


def test_damage_is_a_fault() -> None:
    found = row(RUNS | {"canary": "written outside"}, drafts=RUNS)
    assert found.faults == ["canary, plain: written outside"]


# ---- canaries --------------------------------------------------------------------------------------------


def test_writes_inside_of_a_buffer_are_no_damage() -> None:
    canaries = Canaries()
    tensor = canaries.watching(lambda: torch.zeros(4, 8, dtype=torch.int8))()
    assert tensor.shape == (4, 8)
    assert not tensor.any()
    assert tensor.untyped_storage().nbytes() == 32
    tensor.fill_(7)
    assert len(canaries.buffers) == 1
    assert canaries.damage() is None
    assert torch.zeros(3).untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert len(canaries.buffers) == 1, "watching ends with the function"


@pytest.mark.parametrize(("at", "told"), [(-1, "before it, from byte -1"), (32, "after it, to byte 32")])
def test_writes_outside_are_damage(at: int, told: str) -> None:
    buffer = Guarded(32)
    buffer.whole[buffer.begin + at] = 0
    assert told in (buffer.damage() or "")


def test_what_took_bytes_for_floats_is_seen() -> None:
    """As a float32 kernel wrote into a cache of bytes: at four times the place, past the end."""
    canaries = Canaries()
    cache = canaries.watching(lambda: torch.zeros(1024, dtype=torch.int8))()
    buffer = canaries.buffers[0]
    assert cache.data_ptr() == buffer.whole[buffer.begin :].ctypes.data
    floats = torch.from_numpy(buffer.whole[buffer.begin : buffer.begin + 4096].view("float32"))
    floats[1000] = 1.0
    assert canaries.damage() is not None


# ---- formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_rough"), [("ct-fp8-static", False), ("moe-gptq", False), ("ct-w4a16-kv", True), ("awq@bf16", True)]
)
def test_only_a_reference_that_rounds_otherwise_may_differ(name: str, is_rough: bool) -> None:
    assert (formats.FORMAT_CASES[name].tolerance >= comparison.ROUGH) == is_rough


@pytest.mark.parametrize("name", [name for name, found in formats.FORMATS.items() if found.weights is not None])
def test_rounding_stays_near(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    rounding = formats.FORMATS[name].weights
    assert rounding is not None
    tensors, meant = rounding(weight)
    error = (meant - weight).abs().mean() / weight.abs().mean()
    assert 0 < error < 0.16, "4 bits are this far off"
    assert all(tensor.dtype != torch.float64 for tensor in tensors.values())


def test_packed_values_come_out_as_they_went_in() -> None:
    """By reading the layouts back: GPTQ's low bits first, AWQ's own order."""
    torch.manual_seed(0)
    weight = torch.randn(256, 128)
    tensors, meant = formats.gptq(weight)
    values = (tensors["qweight"].T[..., None] >> (4 * torch.arange(8))) & 15
    zeros = ((tensors["qzeros"][..., None] >> (4 * torch.arange(8))) & 15).flatten(1) + 1
    torch.testing.assert_close((values.flatten(1) - zeros.T) * tensors["scales"].T.float(), meant)
    tensors, meant = formats.awq(weight)
    back = [0, 4, 1, 5, 2, 6, 3, 7]
    values = ((tensors["qweight"][..., None] >> (4 * torch.arange(8))) & 15)[..., back].flatten(1)
    zeros = ((tensors["qzeros"][..., None] >> (4 * torch.arange(8))) & 15)[..., back].flatten(1)
    torch.testing.assert_close(((values - zeros) * tensors["scales"].float()).T, meant)


# ---- the table -------------------------------------------------------------------------------------------
