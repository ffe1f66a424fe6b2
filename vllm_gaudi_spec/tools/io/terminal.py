"""Output of commands: tables and bars on a terminal, plain lines in a pipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO, TypeVar

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 4


def until_nobody_reads(work: Callable[[], int]) -> int:
    """`work` and its exit status, which is 1 where whoever reads stdout has seen enough (`... | head`)."""
    try:
        status = work()
        sys.stdout.flush()  # what is short is still in the buffer
        return status
    except BrokenPipeError:
        # Python flushes at exit again what could not be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    file: TextIO | None = None,
    *,
    numbers: bool = True,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Words in the first and last column, and where there are no numbers also between them. `styles`: rich's, of words
    in the first column."""
    file = file or sys.stdout
    if not file.isatty():
        for line in aligned([columns, *rows]):
            print(line, file=file)
        file.flush()
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    for index, name in enumerate(columns):
        is_words = not numbers or index in (0, len(columns) - 1)
        table.add_column(name, justify="left" if is_words else "right")
    for first, *others in rows:
        # Not markup: what stands in brackets is shown as it is.
        table.add_row(Text(first, (styles or {}).get(first, "")), *map(Text, others))
    Console(file=file).print(table)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Words to the left, the numbers between them to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip() for row in rows
    ]


@contextmanager
def counting(title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr; yields a function to call with the number of new items. `done`: items from before."""
    if not sys.stderr.isatty():
        yield _Lines(title, total, done).more
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), refresh_per_second=_REFRESHES_PER_SECOND) as bars:
        bar = bars.add_task(title.replace("[", "\\["), total=total, completed=done)
        yield lambda number: bars.advance(bar, number)


def counted(items: Iterable[T], title: str, total: int, done: int = 0) -> Iterator[T]:
    """Yield the items, and show progress."""
    with counting(title, total, done) as more:
        for item in items:
            yield item
            more(1)


class _Lines:
    """A line now and then, for output that is no terminal."""

    def __init__(self, title: str, total: int, done: int) -> None:
        self._title, self._total, self._done = title, total, done
        self._started = self._last = time.monotonic()

    def more(self, number: int) -> None:
        self._done += number
        now = time.monotonic()
        if self._done >= self._total or now - self._last >= _SECONDS_BETWEEN_LINES:
            text = f"{self._title}: {self._done} of {self._total}, {now - self._started:.0f} s"
            print(text, file=sys.stderr, flush=True)
            self._last = now
