"""On the emulated Gaudi answers to images are those of transformers, with drafts as without.

A row's faults have what was compiled after warm-up, and a second sync of a step.
"""

import os

import pytest

from tests.full_tests.test_images import check
from tests.models.run import CASES, Run

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


# Fixed size, tiles, patches; borders of chunks within images.
@pytest.mark.parametrize("case", ["llava-images", "internvl-images", "qwen2-vl-images", "qwen2.5-vl-images@chunks"])
def test_they_answer_as_transformers(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = Run({case: CASES[case]}, tmp_path_factory.mktemp("models"))
    (row,) = run.rows(os.environ["VGS_DEVICE"], with_upstream=False)
    check(row)
