"""Files that a command writes where its user says, whole or not at all; and --json, the same for all commands."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

STDOUT = "-"


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
    file = Path(os.path.realpath(where))
    if not file.parent.is_dir():
        swallowed = f", or put {option} last to print" if option == "--json" else ""
        return f"there is no folder {file.parent} for {option} {where}; make it first{swallowed}"
    if file.is_dir():
        return f"{option} {where} is a folder; name a file"
    if not os.access(file if _takes_no_other(file) else file.parent, os.W_OK):
        return f"{option} {where} can not be written; name another file"
    return None


def write(option: str, where: str | Path, content: bytes) -> None:
    try:
        replace(Path(where), content)
    except OSError as error:
        raise NotWritten(f"{option} {where} can not be written: {error.strerror or error}") from None


def write_json(value: Any, where: str | None) -> None:
    if where == STDOUT:
        print(as_json(value).decode(), end="", flush=True)
    elif where is not None:
        write("--json", where, as_json(value))


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def replace(path: Path, content: bytes) -> None:
    """Writes a file beside its name and renames it, so that nobody ever sees half of it."""
    path = Path(os.path.realpath(path))  # a link stays one
    if _takes_no_other(path):
        path.write_bytes(content)
        return
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with scratch.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, scratch)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _takes_no_other(path: Path) -> bool:
    """A pipe or a device, as /dev/stderr or a shell's >(...): what is put in its place would reach nobody."""
    return path.exists() and not path.is_file()
