"""QUANT_CONFIG files, as Intel Neural Compressor reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.tools.tune.scales import SCALE_METHODS


def measuring(prefix: Path) -> dict[str, Any]:
    return _common(prefix, []) | {"mode": "MEASURE"}


def serving(prefix: Path, method: str, exclude: Sequence[str], unseen: Sequence[str]) -> dict[str, Any]:
    """Modules that saw nothing stay as they are, with those that the user excluded."""
    patterns = [*exclude, *(f"^{re.escape(name)}$" for name in unseen)]
    scale_format = "const" if SCALE_METHODS[method].weight_per_channel else "scalar"
    return _common(prefix, patterns) | {"mode": "QUANTIZE", "scale_method": method, "scale_format": scale_format}


def _common(prefix: Path, exclude: Sequence[str]) -> dict[str, Any]:
    return {
        "method": "HOOKS",
        "observer": "maxabs",
        "allowlist": {"types": [], "names": []},
        "blocklist": {"types": [], "names": list(exclude)},
        "dump_stats_path": str(prefix.absolute()),
    }
