"""What is installed, and what of it cannot work together."""

from __future__ import annotations

import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path

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
def test_torchvision_of_another_build(found: dict[str, str], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "version", find)
    mistake = versions.torchvision_mistake()
    assert mistake is None if fits else "pip uninstall torchvision torchaudio torchcodec" in str(mistake)


@pytest.mark.parametrize("imports", [True, False])
def test_a_command_ends_only_where_torchvision_cannot_be_imported(
    imports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of builds are a guess."""
    builds = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "vllm": versions.VLLM_RELEASE}
    monkeypatch.setattr(versions, "version", lambda name: builds[name])
    (tmp_path / "torchvision.py").write_text("" if imports else "raise RuntimeError('operator does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mistake = versions.vllm_mistake()
    assert mistake is None if imports else "torchvision 0.28.0 is made for another torch" in str(mistake)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    assert versions.vllm_mistake() is None, "it is imported here"
