"""On emulated cards: sinks and ALiBi over every KV path answer as transformers does. Warm-up makes all programs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.full_tests.kv_paths import check_sinks_are_reloaded, check_without_and_with_drafts

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


@pytest.mark.slow
def test_weights_of_a_running_engine(made: Callable[[str], str], tmp_path: Path) -> None:
    check_sinks_are_reloaded(made("granite-swa"), tmp_path / "other")
