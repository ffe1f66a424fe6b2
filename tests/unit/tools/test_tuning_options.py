"""Options that the scripts of calibration/ share."""

from __future__ import annotations

import argparse

import pytest

from vllm_gaudi_spec.tools.io.argument_types import json_object, positive
from vllm_gaudi_spec.tools.tune.options import engine_options


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_a_number_that_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of 1 or more"):
        positive(text)


def test_an_object() -> None:
    assert positive("12") == 12
    assert json_object('{"dtype": "float32"}') == {"dtype": "float32"}
    for text in ("[1]", "3", "{"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not (a JSON object|JSON)"):
            json_object(text)


def test_the_user_wins_and_our_own_additions_stay() -> None:
    defaults = {"max_num_seqs": 8, "additional_config": {"gaudi_spec": {"draft_quant_config": "a", "goodput": True}}}
    overrides = {"max_num_seqs": 4, "additional_config": {"gaudi_spec": {"goodput": False}, "other": 1}}
    assert engine_options(defaults, overrides) == {
        "max_num_seqs": 4,
        "additional_config": {"gaudi_spec": {"draft_quant_config": "a", "goodput": False}, "other": 1},
    }
    assert engine_options(defaults, {}) == defaults
    assert engine_options({}, overrides) == overrides
