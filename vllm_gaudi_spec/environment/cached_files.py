"""Reads and writes cached files below `environment.cache_folder()`.

A link could redirect a write to any file of this user, and a read to another user's file. So our folders and the files
in them are never links, and never world-writable. The folders above (`~/.cache`, XDG_CACHE_HOME) are the user's choice
and may be links. Readers check the content of files, which is never executed.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


class UntrustedCacheError(OSError):
    """Raised for a cached file or folder that must not be used. The message has the reason and the remedy.

    Callers that can do without a cache treat it like any other disk error.
    """


def make_folder(folder: Path) -> Path:
    """Create a folder if it is missing, and check it with `check_folder`."""
    folder.mkdir(mode=0o775, parents=True, exist_ok=True)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raise UntrustedCacheError if another user may control the content of a folder."""
    facts, above = folder.lstat(), folder.parent.stat()
    if stat.S_ISLNK(facts.st_mode):
        raise UntrustedCacheError(f"{folder} is a symbolic link; remove it, or set XDG_CACHE_HOME to another folder")
    if facts.st_mode & stat.S_IWOTH:
        raise UntrustedCacheError(f"{folder} is writable by everybody; use chmod o-w, or set XDG_CACHE_HOME")
    # In a world-writable folder, anybody may have created it.
    if above.st_mode & stat.S_IWOTH and facts.st_uid not in (os.geteuid(), 0):
        raise UntrustedCacheError(f"{folder} was made by another user; set XDG_CACHE_HOME to a folder of your own")


def read(path: Path, at_most: int) -> bytes:
    """Return the content of a file in one of our folders.

    Raises:
        ValueError: The file is larger than `at_most` bytes.
    """
    check_folder(path.parent)
    with os.fdopen(_open(path), "rb") as file:
        content = file.read(at_most + 1)
    if len(content) > at_most:
        raise ValueError(f"{path} is larger than {at_most} bytes")
    return content


def _open(path: Path) -> int:
    # O_NONBLOCK: opening a pipe would wait for a writer.
    if path.is_symlink():
        raise UntrustedCacheError(f"{path} is a symbolic link; remove it")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_mode & stat.S_IWOTH:
        os.close(descriptor)
        raise UntrustedCacheError(f"{path} is not a regular file, or is writable by everybody; remove it")
    return descriptor


def write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, creating its folder if it is missing."""
    make_folder(path.parent)
    replace(path, content, stat.S_IRUSR | stat.S_IWUSR)


def stays_inside(path: Path) -> bool:
    """Whether a path is a file in its own folder, or a link to one there."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))


def replace(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace a file, or a link, atomically. Several processes may do so at once.

    Args:
        mode: The permissions of the file, or None for those of the umask.
    """
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
