"""Files that a command writes at a user's path, whole or not at all; and --json, the same for all commands."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.environment.cached_files import replace

STDOUT = "-"


class NotWritten(ValueError):
    """The message names the file and the reason."""


def add_json(add: Any, what: str) -> None:
    """`add`: a parser's `add_argument`."""
    add(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help=f"write {what} to FILE; print it, and nothing else, where FILE is - or left out",
    )


def mistake(option: str, where: str | Path | None) -> str | None:
    """Why the file cannot be written, checked before any work is done for it."""
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
    """To what a user named: through links, and into a pipe or a device."""
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
    """Where links lead, except for a special file: a shell's >(...) is a link to a pipe, and a pipe has no path."""
    path = Path(where)
    path = Path(os.path.realpath(path.parent)) / path.name
    return path if _is_special(path) else Path(os.path.realpath(path))


def _is_special(path: Path) -> bool:
    """A pipe, a device, or a descriptor of a process: a new file of that name would reach nobody."""
    return path.is_relative_to("/proc") or (path.exists() and not path.is_file())


def _stream(path: Path) -> int | None:
    """The descriptor of stdout or stderr where the path is the same file, as /dev/stderr and a log that it goes to:
    written by another descriptor, what is printed later would stand over it."""
    streams = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
    same = (one for one in streams if path.exists() and os.path.samestat(path.stat(), os.fstat(one)))
    return next(same, None)


def _renew(path: Path, content: bytes) -> None:
    """A file with its rights. That it may be written is asked of itself, not of its folder; where only the folder
    refuses, or it is mounted on its own, it is written where it stands."""
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
