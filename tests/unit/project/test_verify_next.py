"""`make verify-next` finds the names that a release of vLLM moved."""

from __future__ import annotations

from pathlib import Path

from tests.verify_next import moved_names

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
