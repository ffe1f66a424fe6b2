"""On the emulated Gaudi in lazy mode models with recurrent layers answer as transformers does, with drafts too.

A row's faults have what was compiled after warm-up, and a second sync of a step. What `make test` runs of this is
tests/conformance/test_states.py.
"""

import os

import pytest

from tests.models.run import CASES, Run

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize("case", ["qwen3-next", "granite4-hybrid", "falcon-h1", "mamba", "lfm2"])
def test_answers_equal_transformers(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = Run({case: CASES[case]}, tmp_path_factory.mktemp("models"))
    (row,) = run.rows(os.environ["VGS_DEVICE"], with_upstream=False)
    assert not row.faults, row
    assert row.reference.startswith("equal"), row
    assert row.drafts.startswith("equal"), row
    assert row.model_drafts.startswith("equal"), row
