"""The pages that users read: their blocks of commands, and the word above each that says what becomes of it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
NEEDS = {"gaudi", "ascend", "cuda", "docker", "hub", "network", "root", "half an hour", "outside"}
"""Why commands are not run: hardware, a download from the Hugging Face hub, a service, rights, time, another project's
files."""
SERVER_ADDRESS = "127.0.0.1:8000"
"""Where blocks behind a server's ask it."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>bash|console|python)\n(?P<text>.*?)^```$", re.M | re.S
)
_SERVES = re.compile(r"\b(?:vllm|make) serve\b")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.mark is not None and re.fullmatch("run(: quick|: after)?", self.mark) is not None

    @property
    def is_quick(self) -> bool:
        """Whether `make test` runs it, and not `make verify` alone."""
        return self.mark == "run: quick"

    @property
    def goes_on(self) -> bool:
        """Whether it needs what the block before it has made: its files, or its server."""
        return self.mark == "run: after" or (not self.num_servers and SERVER_ADDRESS in self.text)

    @property
    def is_for_ci(self) -> bool:
        """Whether `.ci/run` has each of its commands."""
        return self.mark == "ci"

    @property
    def test(self) -> str | None:
        """The test that takes its commands from here."""
        return self.mark.removeprefix("test: ") if self.mark and self.mark.startswith("test: ") else None

    @property
    def needs(self) -> set[str]:
        return (
            set(self.mark.removeprefix("needs: ").split(", "))
            if self.mark and self.mark.startswith("needs: ")
            else set()
        )

    @property
    def num_servers(self) -> int:
        return len(_SERVES.findall(self.text)) if self.language == "bash" else 0


def pages() -> list[Path]:
    found = [
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / folder / "README.md" for folder in ("demo", "calibration", "examples")),
    ]
    more = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "requirements/README.md")
    return sorted(page for page in [*found, *(ROOT / name for name in more)] if page.is_file())


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("language")) + 1, found["language"], found["text"], found["mark"])
        for found in _BLOCK.finditer(text)
    ]


def text_for(test: str, page: Path) -> str:
    """What a page has for a test (FILE::NAME)."""
    return "".join(block.text for block in blocks(page) if block.test == test)


def commands_for(test: str, page: Path) -> list[str]:
    """The same as one command a line, without what the page says of each."""
    text = text_for(test, page).replace("\\\n", " ")
    return [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()]


def scenes(page: Path) -> list[list[Block]]:
    """What is run, each by itself: a block, with those behind it that go on from there."""
    found: list[list[Block]] = []
    for block in (block for block in blocks(page) if block.runs):
        if block.goes_on and found:
            found[-1].append(block)
        else:
            found.append([block])
    return found
