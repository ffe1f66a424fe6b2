"""On emulated cards: sinks and ALiBi over every KV path answer as transformers does. Warm-up makes all programs."""

from collections.abc import Callable

import pytest

from tests.full_tests.kv_paths import check_without_and_with_drafts

pytestmark = [pytest.mark.emulated, pytest.mark.every_card]


@pytest.mark.parametrize(
    "case",
    [
        "gpt-oss",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("bloom", "falcon-alibi", "gpt-oss-mxfp4")),
    ],
)
def test_every_kv_path(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case))
