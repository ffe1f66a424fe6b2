"""Functions that read and write cached files in `environment.cache_folder()`.

A link could redirect a write to one of the user's other files, or a read to another user's file. For this reason, our
folders and the files in them are never links and never world-writable. The parent folders (`~/.cache`, XDG_CACHE_HOME)
are chosen by the user and may be links. File contents are never executed, and readers validate them.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


class UntrustedCacheError(OSError):
    """Raised for a cached file or folder that must not be used. The message contains the reason and a remedy.

    Callers that can do without a cache handle this exception like any other disk error.
    """


def make_folder(folder: Path) -> Path:
    """Create a folder if it does not exist, and then check it with `check_folder`."""
    folder.mkdir(mode=0o775, parents=True, exist_ok=True)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raise UntrustedCacheError if another user could control the contents of the folder."""
    facts, above = folder.lstat(), folder.parent.stat()
    if stat.S_ISLNK(facts.st_mode):
        raise UntrustedCacheError(f"{folder} is a symbolic link; remove it, or set XDG_CACHE_HOME to another folder")
    if facts.st_mode & stat.S_IWOTH:
        raise UntrustedCacheError(f"{folder} is writable by everyone; use chmod o-w, or set XDG_CACHE_HOME")
    # If the parent folder is world-writable, any user may have created this folder.
    if above.st_mode & stat.S_IWOTH and facts.st_uid not in (os.geteuid(), 0):
        raise UntrustedCacheError(f"{folder} belongs to another user; set XDG_CACHE_HOME to your own folder")


def read(path: Path, at_most: int) -> bytes:
    """Return the contents of a file in one of our folders.

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
    # Without O_NONBLOCK, opening a named pipe would block until there is a writer.
    if path.is_symlink():
        raise UntrustedCacheError(f"{path} is a symbolic link; remove it")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_mode & stat.S_IWOTH:
        os.close(descriptor)
        raise UntrustedCacheError(f"{path} is not a regular file, or is writable by everyone; remove it")
    return descriptor


def write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read. The folder is created if necessary."""
    make_folder(path.parent)
    replace(path, content, stat.S_IRUSR | stat.S_IWUSR)


def stays_inside(path: Path) -> bool:
    """Whether a path is a regular file, or a link to a file in the same folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))


def replace(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace a file or link atomically. Several processes may call this function at the same time.

    Args:
        mode: The file's permissions, or None to use the umask.
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
