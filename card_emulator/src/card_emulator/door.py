"""Installs an emulated card in unmodified programs when they import torch.

A "door" is a folder on PYTHONPATH. It contains a distribution whose `torch.backends` entry point installs the card,
just like the vendor's package on a machine with a real card. Child processes inherit the environment variables and
therefore also use the emulated card. The folder also makes this package importable, so the program can run in a
different Python environment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from card_emulator.names import ASCEND910B, CARDS

CARD = "CARD_EMULATOR"
KIND = "CARD_EMULATOR_KIND"
TORCH_NPU = "CARD_EMULATOR_TORCH_NPU"
LAZY_MODE = "PT_HPU_LAZY_MODE"
"""The environment variable with which Habana's bridge selects lazy mode."""

# vLLM workers look up the version of Habana's plugin by this distribution name.
_PLUGIN, _VERSION = "habana-torch-plugin", "1.24.0.400"


def make_door(folder: Path, card: str) -> None:
    """Create `folder` and fill it with a door for `card`."""
    folder.mkdir(parents=True)
    (folder / "card_emulator").symlink_to(Path(__file__).parent)
    name = "card-emulator-door" if card == ASCEND910B else _PLUGIN
    info = folder / f"{name.replace('-', '_')}-{_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {_VERSION}\n")
    if card != ASCEND910B:
        package = folder / "habana_frameworks"
        package.mkdir()
        (package / "__init__.py").write_text("import torch  # which puts the emulated package in its place\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ncard_emulator = card_emulator.door:load\n")


def cached_door(card: str) -> Path:
    """Return the door for `card` in the cache folder, and create it if it does not exist."""
    key = hashlib.sha256(f"{Path(__file__)}\0{Path(__file__).read_text()}\0{card}".encode()).hexdigest()[:16]
    door = cache_folder() / "doors" / key
    if not door.is_dir():
        scratch = door.with_name(f".{key}-{secrets.token_hex(4)}")
        make_door(scratch, card)
        try:
            scratch.rename(door)
        except OSError:
            if not door.is_dir():
                raise
            shutil.rmtree(scratch)  # another process created the folder first
    return door


def variables(
    door: Path, card: str, *, lazy: bool | None = None, kind: bool = False, torch_npu: Path | None = None
) -> dict[str, str]:
    """Return the environment variables that make a process and its children use the emulated card.

    Args:
        lazy: Whether a Gaudi runs in lazy mode or in compiled mode. By default, PT_HPU_LAZY_MODE decides.
        kind: Whether the card accepts operations that are known to fail only on some cards or releases.
        torch_npu: The folder with Huawei's torch_npu. If None, it is searched for in the program's environment.
    """
    found = {
        CARD: card,
        KIND: str(int(kind)),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(door), os.environ.get("PYTHONPATH")])),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }
    if card != ASCEND910B:
        found[LAZY_MODE] = os.environ.get(LAZY_MODE, "1") if lazy is None else str(int(lazy))
    if torch_npu is not None:
        found[TORCH_NPU] = str(torch_npu.absolute())
    return found


def load() -> None:
    """Install the card that the environment variables select. `import torch` calls this function at its end."""
    import card_emulator

    name = os.environ.get(CARD)
    if name not in CARDS:
        raise card_emulator.SetupError(f"{CARD}={name} is not a card; use one of {', '.join(CARDS)}")
    if name == ASCEND910B:
        card_emulator.install_npu(torch_npu_folder(), cache_folder())
        return
    card_emulator.install(name, lazy=os.environ.get(LAZY_MODE, "1") != "0")
    card = card_emulator.device()
    card.hostile = os.environ.get(KIND) != "1"
    # vllm-gaudi indexes with -1 to get the last row (v0.26.0, extension/ops.py, grouped_max) and uses the slots of
    # block -1 (extension/defragmentation.py).
    card.model = dataclasses.replace(card.model, counts_from_the_end=True)


def torch_npu_folder() -> Path:
    """Return the folder that contains Huawei's torch_npu: the folder in `CARD_EMULATOR_TORCH_NPU` if it is set, or else
    that of an installed torch_npu, or else the `torch-npu` folder of the Python environment."""
    if named := os.environ.get(TORCH_NPU):
        return Path(named)
    installed = find_spec("torch_npu")
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parents[1]
    return Path(sys.prefix, "torch-npu")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "card_emulator"
