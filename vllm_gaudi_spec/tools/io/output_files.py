"""Files that a command writes where its user says, whole or not at all; and --json, the same for all commands."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.environment.cached_files import replace

STDOUT = "-"
_PROC = Path("/proc")
_MOST_LINKS = 40
"""As many as Linux follows."""


class NotWritten(ValueError):
    """The message says which file, and why."""


def add_json(add: Any, what: str) -> None:
    """`add`: a parser's `add_argument`."""
    add(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help=f"write {what} to FILE; without FILE, or with -, print it in place of everything else",
    )


def mistake(option: str, where: str | Path | None) -> str | None:
    """What would keep the file from being written, before any work is done for it."""
    if where is None or str(where) == STDOUT:
        return None
    target = _target(where)
    if isinstance(target, int):
        can_be = _is_open_for_writing(target)
    elif not target.parent.is_dir():
        swallowed = f", or put {option} last to print" if option == "--json" else ""
        return f"there is no folder {target.parent} for {option} {where}; make it first{swallowed}"
    elif target.is_dir():
        return f"{option} {where} is a folder; name a file"
    else:
        makes_one = not (target.exists() or _takes_no_other(target))
        can_be = os.access(target.parent if makes_one else target, os.W_OK)
    return None if can_be else f"{option} {where} can not be written; name another file"


def write(option: str, where: str | Path, content: bytes) -> None:
    """What a user named: through links, and into what is no file, as a pipe or a device."""
    target = _target(where)
    if isinstance(target, int):  # what was printed before stands before it
        sys.stdout.flush()
    try:
        if isinstance(target, int):
            _fill(os.dup(target), content)
        elif _takes_no_other(target):
            _fill(os.open(target, os.O_WRONLY | os.O_APPEND), content)
        elif target.exists():
            _renew(target, content)
        else:
            replace(target, content)
    except OSError as error:
        raise NotWritten(f"{option} {where} can not be written: {error.strerror or error}") from None


def write_json(value: Any, where: str | None) -> None:
    if where == STDOUT:
        print(as_json(value).decode(), end="", flush=True)
    elif where is not None:
        write("--json", where, as_json(value))


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _target(where: str | Path) -> Path | int:
    """Where links lead. A number is a descriptor of this process, as it inherited it: /dev/stderr, /dev/fd/63, and so a
    shell's >(...), are links into /proc. They do not lead on by name: there is no file of the name of a pipe, and a
    file opened or made anew under the name of the log that stderr goes to is another than the one that is written."""
    path = Path(where)
    for _ in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if path.parent == _PROC / str(os.getpid()) / "fd" and path.name.isdecimal():
            return int(path.name)
        if path.is_relative_to(_PROC) or not path.is_symlink():
            break
        path = path.parent / os.readlink(path)
    return path


def _is_open_for_writing(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


def _takes_no_other(path: Path) -> bool:
    """A pipe or a device: what is put in its place would reach nobody. Nor is anything made in /proc."""
    return path.is_relative_to(_PROC) or (path.exists() and not path.is_file())


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
