"""Compare emulated cards with transformers over every KV path: sinks, ALiBi, latent attention, experts."""

from collections.abc import Callable

import pytest

from tests.full_tests.engines import engine
from tests.full_tests.kv_paths import SIZES, check, check_without_and_with_drafts, texts

pytestmark = pytest.mark.emulated


@pytest.mark.every_card
@pytest.mark.parametrize(
    "case",
    [
        "gpt-oss",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("bloom", "falcon-alibi", "gpt-oss-mxfp4")),
    ],
)
def test_sinks_and_alibi(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case))


@pytest.mark.parametrize(
    "family",
    ["deepseek", *(pytest.param(f, marks=pytest.mark.slow) for f in ("deepseek_lite", "mixtral", "qwen3_moe"))],
)
def test_latent_attention_and_experts(family: str, tiny: Callable[[str], str]) -> None:
    with engine(tiny(family), **SIZES) as llm:
        found = texts(llm)
    check(family, tiny(family), found)
