"""What is installed, and what of it cannot work together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from vllm_gaudi_spec import versions


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ({"torch": "2.13.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, False),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, True),
        ({"torchvision": "0.28.0"}, True),
    ],
    ids=str,
)
def test_mismatched_torchvision_build_is_detected(
    found: dict[str, str], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "version", find)
    assert versions.has_mismatched_torchvision() is not fits
