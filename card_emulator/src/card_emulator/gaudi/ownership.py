"""Ownership of cards. A card belongs to one process at a time, which locks a file until it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from card_emulator.card import DeviceRefusal

_locked: list[int] = []


def acquire(folder: Path, modules: Sequence[int]) -> None:
    """Claim the first card in `modules` that is free. A process that may use any card tries all of them."""
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
        f"synStatus=20 [Device already acquired] Device acquire failed: other processes have modules {modules}"
    )
