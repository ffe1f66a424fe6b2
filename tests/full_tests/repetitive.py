"""The repetitive prompts: texts to copy, lists and tables to go on with, code to edit."""

from pathlib import Path

FOLDER = Path(__file__).parent / "prompts"


def repetitive_prompts(folder: Path = FOLDER) -> list[str]:
    """One prompt per text file, in the order of their names. The last line break is the editor's, not the text's."""
    prompts = [path.read_text().rstrip("\n") for path in sorted(folder.glob("*.txt"))]
    if not prompts:
        raise ValueError(f"there are no *.txt files in {folder}")
    return prompts
