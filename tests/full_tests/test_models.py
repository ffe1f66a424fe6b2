"""The most served architectures answer as transformers does, with drafts as without, and write in their KV cache alone.

`make verify-models` does the same with all that there are, beside upstream's platform.
"""

import os

import pytest

from tests.models.comparison import Row
from tests.models.probe import DOCTOR, DRAFTS, PLAIN
from tests.models.run import CASES, Run, check_row

SERVED = (
    *("llama", "qwen2", "qwen3", "qwen3-moe", "granite4-hybrid", "mistral", "gemma3", "gemma4-shared-kv"),
    *("deepseek-v3", "qwen3-embedding", "phi3", "smolvlm@text"),
    # KV in FP8 beside weights in the model's dtype, which once overran the cache of a CPU
    "ct-kv-only",
)
VARIANTS = (PLAIN, DRAFTS, DOCTOR)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    run = Run({case: CASES[case] for case in SERVED}, tmp_path_factory.mktemp("models"), VARIANTS)
    return {row.case: row for row in run.rows(os.environ.get("VGS_DEVICE") or "cpu", with_upstream=False)}


@pytest.mark.parametrize("case", SERVED)
def test_answers_equal_transformers(case: str, rows: dict[str, Row]) -> None:
    check_row(rows[case], VARIANTS)


def test_some_drafts_are_accepted_and_some_are_not(rows: dict[str, Row]) -> None:
    """Else drafts on would be drafts off, or nothing but them."""
    counts = [row.drafts.rpartition(", ")[2].split("/") for row in rows.values() if row.drafts]
    accepted, drafted = (sum(int(pair[part]) for pair in counts) for part in (0, 1))
    assert drafted / 10 < accepted < drafted * 9 / 10, counts
