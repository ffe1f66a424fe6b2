"""The most served architectures answer as transformers does, with drafts as without, and write in their KV cache alone.

`make verify-models` does the same with all that there are, beside upstream's platform.
"""

import os

import pytest

from tests.models.comparison import Row
from tests.models.probe import DOCTOR, DRAFTS, PLAIN, RUNS
from tests.models.run import CASES, Run

SERVED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "granite4-hybrid",
    "mistral",
    "gemma3",
    "gemma4-shared-kv",
    "deepseek-v3",
    "qwen3-embedding",
    "phi3",
    "smolvlm@text",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    run = Run({case: CASES[case] for case in SERVED}, tmp_path_factory.mktemp("models"), (PLAIN, DRAFTS, DOCTOR))
    return {row.case: row for row in run.rows(os.environ.get("VGS_DEVICE") or "cpu", with_upstream=False)}


@pytest.mark.parametrize("case", SERVED)
def test_answers_equal_transformers(case: str, rows: dict[str, Row]) -> None:
    row = rows[case]
    assert not row.faults, row
    assert row.ours == RUNS, row
    assert row.reference.startswith("equal"), row
    assert row.doctor == "fine", row


def test_some_drafts_are_accepted_and_some_are_not(rows: dict[str, Row]) -> None:
    """Else drafts on would be drafts off, or nothing but them."""
    counts = [row.drafts.rpartition(", ")[2].split("/") for row in rows.values() if row.drafts]
    accepted, drafted = (sum(int(pair[part]) for pair in counts) for part in (0, 1))
    assert drafted / 10 < accepted < drafted * 9 / 10, counts


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3.5-text@busy", "qwen3.5-moe-text@busy"])
def test_preempted_requests_restore_recurrent_states(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With prompts in chunks. Their classes need torchvision, so they run apart from `test_recurrent`."""
    run = Run({case: CASES[case]}, tmp_path_factory.mktemp("models"), (PLAIN, DRAFTS))
    (row,) = run.rows("cpu", with_upstream=False)
    assert not row.faults, row  # none of them: that no request was preempted
    assert row.reference.startswith("equal"), row
    assert row.drafts.startswith("equal"), row


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "qwen2.5-vl@text",
        "qwen2.5-vl@limits",
        "qwen3-vl@text",
        "gemma3-mm@text",
        "mistral3@text",
        "llava@text",
        "internvl@text",
    ],
)
def test_text_of_multimodal_models_equals_transformers(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Positions of Qwen's have three rows, which are alike where there is text alone."""
    (row,) = Run({case: CASES[case]}, tmp_path_factory.mktemp("models")).rows("cpu", with_upstream=False)
    assert not row.faults, row
    assert row.reference.startswith("equal"), row
    assert row.drafts.startswith("equal"), row
    assert row.model_drafts.startswith("equal"), row
    assert row.doctor == "fine", row
