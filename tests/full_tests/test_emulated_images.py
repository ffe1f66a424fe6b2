"""On the emulated Gaudi, in either mode, answers to images are those of transformers, with drafts as without."""

from pathlib import Path

import pytest

from tests.models.run import check

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize(
    ("device", "cases"),
    [
        # Fixed size, tiles, patches; borders of chunks within images.
        ("hpu-emulated", ("llava-images", "internvl-images", "qwen2-vl-images", "qwen2.5-vl-images@chunks")),
        ("hpu-emulated-compiled", ("qwen2-vl-images",)),
    ],
)
def test_image_answers_equal_transformers(device: str, cases: tuple[str, ...], tmp_path: Path) -> None:
    check(device, tmp_path, *cases)
