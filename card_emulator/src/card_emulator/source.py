"""Find the line in the user's code that caused an event."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from types import CodeType

import torch

Line = tuple[CodeType, int]

# Files that are never reported as a source, because they only forward calls.
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    *(module.__file__ or "" for module in (contextlib, copy, functools)),
    "<frozen",
)
# The files to skip when the cause of a copy, a wait or a launch is reported.
_PASSING_ON = _SKIPPED
_verifications: dict[CodeType, bool] = {}
_is_cause: dict[CodeType, bool] = {}


def look_past(observers: tuple[str, ...], backends: tuple[str, ...]) -> None:
    """Report the callers of these files, instead of the files themselves, as the source of an event.

    Args:
        observers: Files that intercept every operation on its way to the card.
        backends: Files that copy, wait and launch on behalf of their callers.

    Each entry is the path of a file, or of a folder with a trailing separator.
    """
    global _SKIPPED, _PASSING_ON
    _SKIPPED = (*_SKIPPED, *observers)
    _PASSING_ON = (*_SKIPPED, *backends)
    _verifications.clear()
    _is_cause.clear()


def caller() -> Line:
    """Return the line that issued an operation: the innermost frame outside torch and this package."""
    return _innermost(_SKIPPED, _verifications)


def _innermost(skipped: tuple[str, ...], verifications: dict[CodeType, bool]) -> Line:
    """Return the innermost frame outside the skipped files. For speed, the result for each code object is cached."""
    frame = sys._getframe(2)
    while True:
        code = frame.f_code
        skip = verifications.get(code)
        if skip is None:
            skip = verifications[code] = code.co_filename.startswith(skipped)
        if not skip or frame.f_back is None:
            return code, frame.f_lineno
        frame = frame.f_back


def own_caller(line: Line) -> str:
    """Return `line` as text. If the line is in an installed package, add the innermost frame outside such packages."""
    text = describe(line)
    if "site-packages" not in line[0].co_filename:
        return text
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PASSING_ON) and "site-packages" not in name:
            return f"{text} (from {describe((frame.f_code, frame.f_lineno))})"
        frame = frame.f_back
    return text


def describe(line: Line) -> str:
    code, number = line
    name = code.co_filename
    if "site-packages" + os.sep in name:
        name = name.rpartition("site-packages" + os.sep)[2]
    else:
        name = os.sep.join(name.split(os.sep)[-3:])
    return f"{name}:{number} ({code.co_name})"


def here() -> str:
    """Return the source of the current event: the innermost frame that is not in torch, in this package, or in a file
    passed to `look_past`."""
    return own_caller(_innermost(_PASSING_ON, _is_cause))
