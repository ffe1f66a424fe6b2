"""Output of commands: the user's files, tables and progress on a terminal, one-line errors, and exit statuses."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from vllm_gaudi_spec.environment import is_set
from vllm_gaudi_spec.environment.cached_files import replace

STDOUT = "-"
FINE, PROBLEMS, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""


class NotWritten(ValueError):
    """Raised if a file could not be written. The message contains the file name and the reason."""


def add_json(add: Any, what: str) -> None:
    """Add the option `--json` with a parser's `add_argument` method."""
    add(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help=f"write {what} to FILE; if FILE is - or left out, print only that",
    )


def find_mistake(option: str, where: str | Path | None) -> str | None:
    """Return the reason why the file cannot be written, or None. Call this before doing any work for the file."""
    if where is None or str(where) == STDOUT:
        return None
    path = Path(where).absolute()
    if not path.parent.is_dir():
        swallowed = f", or put {option} last to print" if option == "--json" else ""
        return f"there is no folder {path.parent} for {option} {where}; create it first{swallowed}"
    if path.is_dir():
        return f"{option} {where} is a folder; name a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{option} {where} cannot be written; name another file"
    return None


def write(option: str, where: str | Path, content: bytes) -> None:
    """Write a file at the user's path. A regular file is either written completely or not at all."""
    path = Path(where)
    try:
        # The path is a pipe, a device, or a descriptor such as /dev/stdout, which may be redirected to a file.
        if path.absolute().parent in (Path("/dev"), Path("/dev/fd")) or (path.exists() and not path.is_file()):
            sys.stdout.flush()
            with path.open("ab") as file:
                file.write(content)
        elif path.exists():
            _renew(path.resolve(), content)
        else:
            replace(path.resolve(), content)
    except OSError as error:
        raise NotWritten(f"{option} {where} cannot be written: {error.strerror or error}") from None


def write_json(value: Any, where: str | None) -> None:
    if where == STDOUT:
        print(as_json(value).decode(), end="", flush=True)
    elif where is not None:
        write("--json", where, as_json(value))


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _renew(path: Path, content: bytes) -> None:
    """Replace an existing file, or overwrite it if its folder does not allow that."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    try:
        replace(path, content, path.stat().st_mode & 0o7777)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV):
            raise
        path.write_bytes(content)


# ---- on a terminal -----------------------------------------------------------------------------------------


T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 10.0


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    file: TextIO | None = None,
    *,
    numbers: bool = True,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table.

    Args:
        columns: The column titles.
        rows: The cells of each row.
        file: The file to print to. Defaults to stdout.
        numbers: Whether all columns except the first and the last contain numbers, which are right-aligned.
        styles: Maps words in the first column to rich styles.
    """
    file = file or sys.stdout
    if not file.isatty():
        for line in align([columns, *rows]):
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
        # Use Text objects, because brackets in strings would be interpreted as markup.
        table.add_row(Text(first, (styles or {}).get(first, "")), *map(Text, others))
    Console(file=file).print(table)


def show_findings(
    columns: Sequence[str], findings: Sequence[tuple[str, str, str, str]], styles: Mapping[str, str]
) -> None:
    """Print the status, the subject, and the text of each finding, with its remedy, if any, below the text."""
    if sys.stdout.isatty():
        rows = [
            (status, subject, text + (f"\n→ {remedy}" if remedy else "")) for status, subject, text, remedy in findings
        ]
        show_table(columns, rows, numbers=False, styles=styles)
        return
    for status, subject, text, remedy in findings:
        print(f"{status:<12} {subject:<17} {text}" + (f"\n{'':<30} -> {remedy}" if remedy else ""))


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-align the first and last columns, and right-align the numbers in between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip() for row in rows
    ]


@contextmanager
def counting(title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr, and yield a function that is called with the number of new items.

    If there is no terminal, a line is printed every few seconds. `done` is the number of items from earlier runs.
    """
    if not sys.stderr.isatty():
        started = last = time.monotonic()

        def count(number: int) -> None:
            nonlocal done, last
            done, now = done + number, time.monotonic()
            if done >= total or now - last >= _SECONDS_BETWEEN_LINES:
                print(f"{title}: {done} of {total}, {now - started:.0f} s", file=sys.stderr, flush=True)
                last = now

        yield count
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), refresh_per_second=4) as bars:
        bar = bars.add_task(title.replace("[", "\\["), total=total, completed=done)
        yield lambda number: bars.advance(bar, number)


def counted(items: Iterable[T], title: str, total: int, done: int = 0) -> Iterator[T]:
    """Yield the items while showing progress."""
    with counting(title, total, done) as count:
        for item in items:
            yield item
            count(1)


# ---- exit statuses and processes ---------------------------------------------------------------------------


def guard(command: str, work: Callable[[], int], *, verbose: bool = False) -> int:
    """Run `work` and return its exit status. Errors that any command may raise are reported in one line.

    If `verbose` is set, a missing package is reported with its traceback.
    """
    try:
        status = work()
        sys.stdout.flush()  # short output may still be in the buffer
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as in `... | head`
        # Otherwise, Python would flush stdout again at exit, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PROBLEMS
    except NotWritten as error:
        return fail(command, str(error), PROBLEMS)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if verbose or package in ("", "vllm_gaudi_spec"):  # a bug in this package
            raise
        return fail(command, f"{package} is not installed; {_explain_how_to_get(package)}", PROBLEMS)
    except KeyboardInterrupt:
        return fail(command, "interrupted", INTERRUPTED)


def _explain_how_to_get(package: str) -> str:
    from vllm_gaudi_spec.device_table import DEVICES, EMULATOR, GET_EMULATOR

    if any(package == entry.software for entry in DEVICES.values()):
        return "use the image of the card's vendor, which has it"
    return GET_EMULATOR if package == EMULATOR else "run `make setup`, or install this package again"


def fail(command: str, message: str, status: int = USAGE) -> int:
    print(f"gaudi-spec {command}: error: {message}", file=sys.stderr, flush=True)
    return status


def find_model_mistake(*models: object) -> str | None:
    """Return a message if a model folder is missing. Other names are assumed to be Hugging Face model IDs."""
    for model in models:
        if isinstance(model, str) and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            return f"there is no model folder {model}; pass a folder or a Hugging Face id"
    return None


def run_module(module: str, variables: dict[str, str], arguments: Sequence[str]) -> NoReturn:
    """Replace this process with a module of this package, and set variables that must be set before torch is loaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    settings = [f"{name}={value}" for name, value in variables.items()]
    # -P: as for console scripts, Python does not search for modules in the current folder.
    os.execvp("env", ["env", *settings, sys.executable, "-P", "-m", module, *arguments])


def unless_set(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if not is_set(name)}
