"""Print a conversation: on a terminal with accepted drafts in color, elsewhere only the answers."""

from __future__ import annotations

from typing import TextIO

from vllm_gaudi_spec.tools.live.answers import DRAFT, REASONING, TARGET, UNKNOWN, Answer, Piece
from vllm_gaudi_spec.tools.live.http import printable

_STYLES = {DRAFT: "green", TARGET: "", UNKNOWN: "yellow", REASONING: "dim"}


class Transcript:
    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self._file = file
        self._console = Console(file=file, highlight=False, soft_wrap=True) if file.isatty() else None

    def begin(self, address: str, model: str, k: int) -> None:
        if self._console is None:
            return
        self._styled(f"{model} at {address}\n", "dim")
        if k == 0:
            self._styled("The server exports no acceptance by position: nothing is colored.\n", "dim")
            return
        self._styled(f"k = {k}: ", "dim")
        for kind, meaning in ((DRAFT, "accepted drafts"), (TARGET, "the target's tokens"), (UNKNOWN, "not known")):
            self._styled(f"{meaning}  ", _STYLES[kind])
        self._styled("\n", "")

    def piece(self, piece: Piece) -> None:
        if self._console is not None:
            self._styled(piece.text, _STYLES[piece.kind])
        elif piece.kind != REASONING:
            self._file.write(piece.text)
        self._file.flush()

    def end(self, answer: Answer, seconds: float) -> None:
        if self._console is None:
            self._file.write("\n")
            return
        self._styled(f"\n{summary(answer, seconds)}\n", "dim")

    def _styled(self, text: str, style: str) -> None:
        from rich.text import Text

        assert self._console is not None
        self._console.print(Text(printable(text), style), end="")


def summary(answer: Answer, seconds: float) -> str:
    found = [f"{seconds:.1f} s"]
    if answer.k:
        found.insert(0, f"{answer.num_tokens} tokens")
        shown = f"{answer.num_drafts} shown as accepted drafts"
        unknown = f", {answer.num_unknown} not known" if answer.num_unknown else ""
        count = "'s count is not known" if answer.num_accepted is None else f" counted {answer.num_accepted:.0f}"
        found.append(f"{shown}{unknown}; the server{count}")
    if answer.finish_reason not in ("", "stop"):
        found.append(f"ended: {answer.finish_reason}")
    return ", ".join(found)
