"""The newcomer's path, as README.md has it."""

import re

from tests.unit.processes import ROOT

README = ROOT / "README.md"
SCREEN = 40
"""Lines that are seen before anybody scrolls."""


def commands() -> list[str]:
    """Of the code blocks below "First steps", one after the other, without what the README says of each."""
    section = README.read_text().split("\n## First steps\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines]
