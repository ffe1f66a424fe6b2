"""On the emulated Gaudi, in either mode, answers to images are those of transformers, with drafts as without.

A row's faults have what was compiled after warm-up, and a second sync of a step.
"""

import pytest

from tests.full_tests.test_images import check
from tests.models.run import CASES, Run

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize(
    ("device", "case"),
    [
        # Fixed size, tiles, patches; borders of chunks within images.
        ("hpu-emulated", "llava-images"),
        ("hpu-emulated", "internvl-images"),
        ("hpu-emulated", "qwen2-vl-images"),
        ("hpu-emulated", "qwen2.5-vl-images@chunks"),
        ("hpu-emulated-compiled", "qwen2-vl-images"),
    ],
)
def test_image_answers_equal_transformers(device: str, case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = Run({case: CASES[case]}, tmp_path_factory.mktemp("models"))
    (row,) = run.rows(device, with_upstream=False)
    check(row)
