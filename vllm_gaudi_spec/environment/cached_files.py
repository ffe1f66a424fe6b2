"""Reading and writing this project's cached files, below `environment.cache_folder()`.

A link could redirect a write to any file of this user, and a read to a file of somebody else. So our folders and the
files in them are never links; the folders above (`~/.cache`, XDG_CACHE_HOME) are the user's choice and may be links.
No cache is in a world-writable folder. The reader of a file checks its content, which is never run.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


class UntrustedCacheError(OSError):
    """A cached file or its folder may not be used; the message has the reason and the remedy. Callers that can do
    without a cache treat it as any other disk error."""


def own_folder(folder: Path) -> Path:
    """The folder, made if it is missing. UntrustedCacheError if another user may control its content."""
    folder.mkdir(mode=0o775, parents=True, exist_ok=True)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    facts, above = folder.lstat(), folder.parent.stat()
    if stat.S_ISLNK(facts.st_mode):
        raise UntrustedCacheError(f"{folder} is a symbolic link; remove it, or set XDG_CACHE_HOME to another folder")
    if facts.st_mode & stat.S_IWOTH:
        raise UntrustedCacheError(f"everybody may write to {folder}; use chmod o-w, or set XDG_CACHE_HOME")
    # Where everybody may write, anybody may have made it.
    if above.st_mode & stat.S_IWOTH and facts.st_uid not in (os.geteuid(), 0):
        raise UntrustedCacheError(f"{folder} was made by another user; set XDG_CACHE_HOME to a folder of your own")


def read(path: Path, at_most: int) -> bytes:
    """The content of a file in a folder of ours. ValueError if it is larger than `at_most` bytes."""
    check_folder(path.parent)
    with os.fdopen(_open(path), "rb") as file:
        content = file.read(at_most + 1)
    if len(content) > at_most:
        raise ValueError(f"{path} is larger than {at_most} bytes")
    return content


def _open(path: Path) -> int:
    # Nonblocking: opening a pipe would wait for a writer.
    if path.is_symlink():
        raise UntrustedCacheError(f"{path} is a symbolic link; remove it")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_mode & stat.S_IWOTH:
        os.close(descriptor)
        raise UntrustedCacheError(f"{path} is not a regular file, or everybody may write to it; remove it")
    return descriptor


def write(path: Path, content: bytes) -> None:
    """Writes a file in a folder of ours, which is made if it is missing, for its owner alone."""
    own_folder(path.parent)
    replace(path, content, stat.S_IRUSR | stat.S_IWUSR)


def stays_inside(path: Path) -> bool:
    """Whether a file named by a user is in its own folder, or is a link to one there."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))


def replace(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file under a temporary name and renames it, so that it is never seen half written, and several processes
    may do so at once. It replaces whatever has the name, a link too. `mode`: its permissions; None: those of the
    umask."""
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
