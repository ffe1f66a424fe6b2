"""A backend that torch loads on import through an entry point of `torch.backends`, as it loads Habana's bridge."""

from pathlib import Path

_MODULE = """
import os

import card_emulator


def load():
    card_emulator.install(lazy=os.environ.get("PT_HPU_LAZY_MODE", "{default}") != "0")
"""


def write_bridge(folder: Path, default_mode: int = 1) -> None:
    """Write the bridge into a folder for PYTHONPATH.

    Like the real one it reads PT_HPU_LAZY_MODE once, when torch is imported. `default_mode` is 1 in the sources of
    bridge 1.19, and 0 in today's documentation.
    """
    (folder / "autoloaded_gaudi.py").write_text(_MODULE.format(default=default_mode))
    info = folder / "habana_torch_plugin-1.24.0.400.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 1.24.0.400\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ndevice_backend = autoloaded_gaudi:load\n")
