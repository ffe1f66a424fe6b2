"""On emulated cards: layers that share KV, of two head sizes, and scaled logits answer as transformers does, and write
in the KV cache alone."""

import os

import pytest

from tests.models.probe import DOCTOR, DRAFTS, PLAIN, RUNS
from tests.models.run import CASES, Run

pytestmark = [pytest.mark.emulated, pytest.mark.every_card]


@pytest.mark.parametrize(
    "case", ["gemma4-shared-kv", *(pytest.param(case, marks=pytest.mark.slow) for case in ("mistral4", "granite"))]
)
def test_answers_equal_transformers(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = Run({case: CASES[case]}, tmp_path_factory.mktemp("models"), (PLAIN, DRAFTS, DOCTOR))
    (row,) = run.rows(os.environ["VGS_DEVICE"], with_upstream=False)
    assert not row.faults, row
    assert row.ours == RUNS, row
    assert row.reference.startswith("equal"), row


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["qwen2.5-vl@text", "qwen3-vl@text", "gemma3-mm@text", "gemma4-mm@suppressed", "mistral3@text"]
)
def test_text_of_multimodal_models_equals_transformers(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With drafts of both kinds. A row's faults have what was compiled after warm-up, and a second sync of a step."""
    (row,) = Run({case: CASES[case]}, tmp_path_factory.mktemp("models")).rows(
        os.environ["VGS_DEVICE"], with_upstream=False
    )
    assert not row.faults, row
    assert row.reference.startswith("equal"), row
    assert row.drafts.startswith("equal"), row
    assert row.model_drafts.startswith("equal"), row


def test_kv_scheme_of_a_checkpoint_writes_only_the_kv_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A checkpoint that asks for it alone, with weights in the model's dtype: what once overran the cache of a CPU."""
    run = Run({"ct-kv-only": CASES["ct-kv-only"]}, tmp_path_factory.mktemp("models"), (PLAIN, DRAFTS, DOCTOR))
    (row,) = run.rows(os.environ["VGS_DEVICE"], with_upstream=False)
    assert not row.faults, row
    assert row.ours == RUNS, row
    assert row.reference.startswith("equal"), row
    assert row.doctor == "fine", row
