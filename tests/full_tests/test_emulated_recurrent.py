"""On the emulated Gaudi in lazy mode models with recurrent layers answer as transformers does, with drafts too.

What `make test` runs of this is tests/conformance/test_states.py.
"""

import os
from pathlib import Path

import pytest

from tests.models.run import check

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def test_answers_equal_transformers(tmp_path: Path) -> None:
    check(os.environ["VGS_DEVICE"], tmp_path, "qwen3-next", "granite4-hybrid", "falcon-h1", "mamba", "lfm2")
