"""The emulated Gaudi in compiled mode, beside tests of lazy mode: `make verify` runs every task in it."""

from pathlib import Path

import pytest

from tests.full_tests.test_emulated_tasks import check_task
from vllm_gaudi_spec.tools.report import record

pytestmark = pytest.mark.emulated


def test_mtp_in_compiled_mode(tmp_path: Path) -> None:
    """The MTP layer has KV and drafts one token after another; its demo model is tiny, so most of a minute and a half
    is compiling."""
    check_task("mtp", tmp_path, batch=1, k=2, PT_HPU_LAZY_MODE="0")
    assert "compiled" in record.read(tmp_path / "report.json")["device"]["mode"]
