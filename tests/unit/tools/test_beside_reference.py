"""Comparing our texts and log-likelihoods with a reference's."""

from __future__ import annotations

import pytest

from vllm_gaudi_spec.tools.tune.beside_reference import Difference, compare


def side(*answers: tuple[list[int], list[float]], margins: float = 1.0) -> dict[str, object]:
    return {
        "answers": [
            {"ids": ids, "logprobs": logprobs, "margins": [margins] * len(ids), "text": ""} for ids, logprobs in answers
        ]
    }


def test_comparison() -> None:
    reference = side(([1, 2, 3], [-1.0, -2.0]), ([4, 5, 6], [-0.5, -0.5]))
    found = compare(reference, side(([1, 2, 3], [-1.0, -2.25]), ([4, 9, 9], [-0.5, -0.25])))
    assert (found.equal, found.of) == (1, 2)
    assert found.differences == (Difference(prompt=1, position=1, reference=5, ours=9, margin=1.0),)
    assert not found.differences[0].tied
    assert (found.num_scored, found.largest, found.average) == (4, 0.25, 0.125)
    assert found.as_json()["equal"] == 1
    assert found.as_json()["tied"] == 0


def test_a_tie() -> None:
    (difference,) = compare(side(([1], [0.0]), margins=1e-4), side(([2], [0.0]))).differences
    assert difference.tied


def test_answers_of_other_lengths_are_a_fault() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        compare(side(([1, 2], [0.0])), side(([1], [0.0])))
