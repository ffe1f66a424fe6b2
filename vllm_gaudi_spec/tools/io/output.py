"""Output of commands: files at a user's path, tables and progress on a terminal, errors in one line, exit statuses."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from vllm_gaudi_spec.environment import is_set
from vllm_gaudi_spec.environment.cached_files import replace

STDOUT = "-"


class NotWritten(ValueError):
    """A file could not be written; the message names it and the reason."""


def add_json(add: Any, what: str) -> None:
    """Add `--json` with a parser's `add_argument`."""
    add(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help=f"write {what} to FILE; print it, and nothing else, where FILE is - or left out",
    )


def mistake(option: str, where: str | Path | None) -> str | None:
    """Return why the file cannot be written, or None; called before any work is done for it."""
    if where is None or str(where) == STDOUT:
        return None
    path = _resolved(where)
    if not path.parent.is_dir():
        swallowed = f", or put {option} last to print" if option == "--json" else ""
        return f"there is no folder {path.parent} for {option} {where}; make it first{swallowed}"
    if path.is_dir():
        return f"{option} {where} is a folder; name a file"
    is_new = not (path.exists() or _is_special(path))
    can_be = os.access(path.parent if is_new else path, os.W_OK)
    if path.is_symlink():  # the link of a descriptor has the rights that it was opened with
        can_be = can_be and bool(path.lstat().st_mode & stat.S_IWUSR)
    return None if can_be else f"{option} {where} cannot be written; name another file"


def write(option: str, where: str | Path, content: bytes) -> None:
    """Write to the path that a user named, through links, and into pipes and devices."""
    try:
        path = _resolved(where)
        if (stream := _stream(path)) is not None:
            sys.stdout.flush()  # what was printed before stands before it
            _fill(os.dup(stream), content)
        elif _is_special(path):
            _fill(os.open(path, os.O_WRONLY | os.O_APPEND), content)
        elif path.exists():
            _renew(path, content)
        else:
            replace(path, content)
    except OSError as error:
        raise NotWritten(f"{option} {where} cannot be written: {error.strerror or error}") from None


def write_json(value: Any, where: str | None) -> None:
    if where == STDOUT:
        print(as_json(value).decode(), end="", flush=True)
    elif where is not None:
        write("--json", where, as_json(value))


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _resolved(where: str | Path) -> Path:
    """Resolve links, except to a special file: a shell's >(...) is a link to a pipe, which has no path."""
    path = Path(where)
    path = Path(os.path.realpath(path.parent)) / path.name
    return path if _is_special(path) else Path(os.path.realpath(path))


def _is_special(path: Path) -> bool:
    """Whether the path is a pipe, a device or a descriptor, which a new file must not replace."""
    return path.is_relative_to("/proc") or (path.exists() and not path.is_file())


def _stream(path: Path) -> int | None:
    """Return the descriptor of stdout or stderr if it is the same file as the path, such as /dev/stderr.

    Through another descriptor, later output would overwrite what is written.
    """
    streams = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
    same = (one for one in streams if path.exists() and os.path.samestat(path.stat(), os.fstat(one)))
    return next(same, None)


def _renew(path: Path, content: bytes) -> None:
    """Replace an existing file and keep its mode.

    The file itself decides whether it may be written. If only its folder refuses, or if the file is a mount, it is
    overwritten in place.
    """
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    try:
        replace(path, content, path.stat().st_mode & 0o7777)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV):
            raise
        _fill(os.open(path, os.O_WRONLY | os.O_TRUNC), content)


def _fill(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(content)


# ---- on a terminal -----------------------------------------------------------------------------------------


T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 4


def until_nobody_reads(work: Callable[[], int]) -> int:
    """Run `work` and return its exit status, or 1 if the reader of stdout has gone (`... | head`)."""
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
    """Print a table: words in the first and last column, and with `numbers` right-aligned numbers between them.

    `styles` maps words of the first column to rich's styles.
    """
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
    """Align the first and last column to the left and the numbers between them to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip() for row in rows
    ]


@contextmanager
def counting(title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr; yield a function to call with the number of new items. `done`: items from before."""
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
    """Progress as a line now and then, where stderr is not a terminal."""

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


# ---- exit statuses and processes ---------------------------------------------------------------------------


FINE, PROBLEMS, USAGE = 0, 1, 2
"""Exit statuses."""


_REQUIRED = ("jinja2", "numpy", "prometheus_client", "rich", "shtab")
"""The packages that pyproject.toml requires, whose names to import and to install are equal."""


def guarded(command: str, work: Callable[[], int], *, verbose: bool = False) -> int:
    """Run `work` and return its exit status; report what may end any command in one line.

    With `verbose` a missing package raises with its traceback.
    """
    try:
        return until_nobody_reads(work)
    except NotWritten as error:
        return fail(command, str(error), PROBLEMS)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if verbose or package in ("", "vllm_gaudi_spec"):  # our own mistake
            raise
        return fail(command, f"{package} is not installed; {_how_to_get(package)}", PROBLEMS)
    except KeyboardInterrupt:
        return fail(command, "interrupted", 130)


def _how_to_get(package: str) -> str:
    from vllm_gaudi_spec.devices import EMULATOR, GET_EMULATOR, comes_with_an_image

    if comes_with_an_image(package):
        return "use the card's vendor's image, which has it"
    if package == EMULATOR:
        return GET_EMULATOR
    return "run `make setup`" + (f", or pip install {package}" if package in _REQUIRED else "")


def fail(command: str, message: str, status: int = USAGE) -> int:
    print(f"gaudi-spec {command}: error: {message}", file=sys.stderr, flush=True)
    return status


def model_mistake(*models: object) -> str | None:
    """Return a message if a model folder is missing; other names are taken for Hugging Face ids."""
    for model in models:
        if isinstance(model, str) and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            return f"there is no model folder {model}; give a folder or a Hugging Face id"
    return None


def python(module: str, values: dict[str, str], arguments: list[str]) -> list[str]:
    """Return the command that runs a module of ours with these variables set before torch and vLLM are loaded.

    -P: as for console scripts, modules are not searched for in the current folder.
    """
    return [
        "env",
        *(f"{name}={value}" for name, value in values.items()),
        sys.executable,
        "-P",
        "-m",
        module,
        *arguments,
    ]


def unless_set(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if not is_set(name)}


def become(words: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(words[0], words)
