"""`make verify-next` finds the names that a release of vLLM moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify_next import lay_out, moved_names

SOURCE = """
from vllm.kept import here
from vllm.package import module

if FROM_0_33:
    from vllm.newer import switched


def later():
    from vllm.moved import Gone, lost
"""


def release(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "vllm" / name).write_text(text)
    (folder / "PKG-INFO").write_text("Name: vllm\nVersion: 0.99.1\n")
    return folder


def test_moved_names_are_listed_with_their_new_modules(tmp_path: Path) -> None:
    source = release(
        tmp_path,
        {
            "__init__.py": "",
            "kept.py": "def here(): ...",
            "package/module.py": "",
            "moved.py": "",
            "other.py": "class Gone: ...",
        },
    )
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "module.py").write_text(SOURCE)
    assert [*moved_names(source, ours)] == [
        "module.py: vllm.moved.Gone (now in vllm/other.py)",
        "module.py: vllm.moved.lost (now in no module)",
    ]


def test_only_source_distributions_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.verify_next.STATE", tmp_path / "state")
    with pytest.raises(SystemExit, match="is no source distribution of vLLM"):
        lay_out(tmp_path)
    site, version = lay_out(release(tmp_path, {"__init__.py": ""}))
    assert version == "0.99.1"
    assert (site / "vllm" / "__init__.py").is_file()
    assert (site / "vllm-0.99.1.dist-info" / "METADATA").is_file()
