"""Check what hadolint does not: files that an image lacks, and how each image starts."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, with comments left out and continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text())
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            current = stages.setdefault(rest.split(" AS ")[1], [])
        current.append((name, rest.strip()))
    return stages


def read_context() -> list[str]:
    """Return what .dockerignore lets through."""
    return [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def test_copied_files_are_part_of_the_build_context() -> None:
    copies = [rest for stage in read_stages().values() for name, rest in stage if name == "COPY"]
    sources = {source for rest in copies if "--from" not in rest for source in rest.split()[:-1]} - {"."}
    assert "card_emulator/pyproject.toml" in sources
    for source in sources:
        assert any(source == path or source.startswith(f"{path}/") for path in read_context()), source
        assert list(ROOT.glob(source)), source


def test_targets_of_the_demos_links_are_part_of_the_build_context() -> None:
    links = [path for path in (ROOT / "vllm_gaudi_spec" / "demo").iterdir() if path.is_symlink()]
    assert links
    assert {link.resolve().relative_to(ROOT).as_posix() for link in links} <= set(read_context())
