"""On emulated cards: layers that share KV, of two head sizes, answer as transformers does and write in it alone."""

import os

import pytest

from tests.models.probe import RUNS
from tests.models.run import CASES, Run

pytestmark = [pytest.mark.emulated, pytest.mark.every_card]


@pytest.mark.parametrize("case", ["gemma4-shared-kv", pytest.param("mistral4", marks=pytest.mark.slow)])
def test_it_answers_as_transformers(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = Run({case: CASES[case]}, tmp_path_factory.mktemp("models"))
    (row,) = run.rows(os.environ["VGS_DEVICE"], with_upstream=False)
    assert not row.faults, row
    assert row.ours == RUNS, row
    assert row.reference.startswith("equal"), row


def test_kv_of_8_bits_is_served_or_set_aside_and_nothing_is_written_outside(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A checkpoint that asks for it alone, with weights in the model's dtype: what once overran the cache of a CPU."""
    run = Run({"ct-kv-only": CASES["ct-kv-only"]}, tmp_path_factory.mktemp("models"))
    (row,) = run.rows(os.environ["VGS_DEVICE"], with_upstream=False)
    assert not row.faults, row
    assert row.ours == RUNS, row
    assert row.reference.startswith("equal"), row
    assert row.doctor == "fine", row
