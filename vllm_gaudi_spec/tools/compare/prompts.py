"""Prompts out of a folder of texts."""

from pathlib import Path


def prompts_in(folder: Path) -> list[str]:
    """One prompt per text file, in the order of their names. The last line break is the editor's, not the text's."""
    prompts = [path.read_text().rstrip("\n") for path in sorted(folder.glob("*.txt"))]
    if not prompts:
        raise ValueError(f"there are no *.txt files in {folder}")
    return prompts
