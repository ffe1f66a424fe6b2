"""On emulated cards: models answer as transformers does, with drafts as without, and write in the KV cache alone."""

import os
from pathlib import Path

import pytest

from tests.models.probe import DOCTOR, DRAFTS, PLAIN
from tests.models.run import check

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize(
    "cases",
    [
        # Layers that share KV, of two head sizes; attention sinks.
        pytest.param(("gemma4-shared-kv", "gpt-oss"), marks=pytest.mark.every_card),
        ("deepseek-v3",),
        pytest.param(("mistral4", "granite", "deepseek-v2-lite", "ct-kv-only"), marks=pytest.mark.slow),
        pytest.param(("bloom", "falcon-alibi", "gpt-oss-mxfp4", "mixtral", "qwen3-moe"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_answers_equal_transformers(cases: tuple[str, ...], tmp_path: Path) -> None:
    check(os.environ["VGS_DEVICE"], tmp_path, *cases, variants=(PLAIN, DRAFTS, DOCTOR))


@pytest.mark.slow
def test_text_of_multimodal_models_equals_transformers(tmp_path: Path) -> None:
    cases = ("qwen2.5-vl@text", "qwen3-vl@text", "gemma3-mm@text", "gemma4-mm@suppressed", "mistral3@text")
    check(os.environ["VGS_DEVICE"], tmp_path, *cases)
