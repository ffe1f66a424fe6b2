"""Exclusive ownership of cards. A process that uses a card keeps a lock on a file until the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from card_emulator.card import DeviceRefusal

_locked: list[int] = []


def acquire(folder: Path, modules: Sequence[int]) -> None:
    """Claim the first free card in `modules`, or raise an error if all of them belong to other processes.

    Args:
        folder: The folder for the lock files.
        modules: The module IDs of the cards that the process may use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for module in modules:
        file = os.open(folder / str(module), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        _locked.append(file)
        return
    raise DeviceRefusal(
        f"synStatus=20 [Device already acquired] Device acquire failed: other processes use modules {modules}"
    )
