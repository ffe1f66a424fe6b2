"""torchvision of another build than torch: its import fails, and passes once two schemas are defined."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.models import vision

IMPORT = f"""
import sys; sys.path.append({str(vision.FOLDER)!r})
{{first}}
import torch, torchvision.transforms.v2.functional as functional
print(functional.resize(torch.zeros(3, 5, 7), [2, 2]).shape)
"""


@pytest.mark.parametrize(
    ("first", "imports"),
    [
        ("import torch", False),  # fails when torchvision asks for its operators: then `compat/torchvision.py` can go
        ("from vllm_gaudi_spec import compat; compat.define_missing_operators()", True),
    ],
    ids=["alone", "with schemas"],
)
def test_its_import(first: str, imports: bool) -> None:
    command = [sys.executable, "-c", IMPORT.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == ("torch.Size([3, 2, 2])\n" if imports else ""), done.stderr
    assert imports or "operator torchvision::nms does not exist" in done.stderr
