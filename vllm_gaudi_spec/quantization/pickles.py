"""Finds the calls that unpickling a file would make, without unpickling it.

Intel Neural Compressor (INC) stores measurements and scales as a pickled dictionary in .npz files, which it unpickles
on a Gaudi. This plugin never unpickles these files, and it checks them before INC reads them.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import IO, cast

import numpy as np
from numpy.lib import format as npy

# The calls in pickles of object arrays, in all formats that NumPy writes.
_OF_ARRAYS = {
    *(
        f"{module}.{name}"
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("_reconstruct", "scalar")
    ),
    *("numpy.ndarray", "numpy.dtype", "_codecs.encode"),
}
_TEXTS = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_STORES = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_FETCHES = {"GET", "BINGET", "LONG_BINGET"}
_NAMES = {"GLOBAL", "INST"}
# Opcodes for objects that the unpickling program provides.
_OUTSIDE = {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
_MARKS = {"PROTO", "FRAME"}


def list_foreign_calls(member: IO[bytes]) -> Iterator[str]:
    """Yield the imports and calls in an .npy file's pickle that are not needed for an array.

    Raises:
        ValueError: The file is not an .npy file.
    """
    version = npy.read_magic(member)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    _, _, dtype = read_header(member)
    if np.dtype(dtype).hasobject:
        yield from (name for name in list_calls(member.read()) if name not in _OF_ARRAYS)


def list_calls(pickled: bytes) -> Iterator[str]:
    """Yield the dotted names of all calls. If a name is computed during unpickling, an invalid name is yielded
    instead."""
    texts: list[object] = []  # the strings on top of the stack
    memo: dict[int, object] = {}
    for operation, argument, _ in pickletools.genops(pickled):
        kind = operation.name
        if kind in _TEXTS:
            texts.append(argument)
        elif kind in _STORES:
            memo[len(memo) if kind == "MEMOIZE" else cast("int", argument)] = texts[-1] if texts else None
        elif kind in _FETCHES:
            texts.append(memo.get(cast("int", argument)))
        elif kind not in _MARKS:
            if kind == "STACK_GLOBAL":
                yield ".".join(map(str, texts[-2:]))
            elif kind in _NAMES:
                yield str(argument).replace(" ", ".")
            elif kind in _OUTSIDE:
                yield kind
            texts = []
