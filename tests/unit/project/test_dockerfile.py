"""Check what hadolint does not: files that an image lacks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def read_context() -> list[str]:
    """Return what .dockerignore lets through."""
    return [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def test_copied_files_are_part_of_the_build_context() -> None:
    copies = re.findall(r"(?m)^COPY (.*)", re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text()))
    sources = {source for rest in copies if "--from" not in rest for source in rest.split()[:-1]} - {"."}
    assert "card_emulator/pyproject.toml" in sources
    for source in sources:
        assert any(source == path or source.startswith(f"{path}/") for path in read_context()), source
        assert list(ROOT.glob(source)), source


def test_targets_of_the_demos_links_are_part_of_the_build_context() -> None:
    links = [path for path in (ROOT / "vllm_gaudi_spec" / "demo").iterdir() if path.is_symlink()]
    assert links
    assert {link.resolve().relative_to(ROOT).as_posix() for link in links} <= set(read_context())
