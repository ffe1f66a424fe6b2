"""Writes measurement and scale files, which `vllm_gaudi_spec/quantization/files.py` describes and reads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gaudi_spec.quantization import files


def write_files(prefix: str | Path, record: files.Record, method: str = "") -> Path:
    """Write both files of one rank atomically, and return their path without a suffix."""
    path = files.stem(prefix, record.rank, record.world, method)
    common = {"GlobalRank": None, "LocalRank": record.rank, "Mode": record.mode}
    extra = {
        "Model": record.model,
        "Device": record.device,
        "Linears": {
            name: {"axis": s.axis, "parts": [[p.rows, p.heads] for p in s.parts], "columns": s.columns}
            for name, s in record.linears.items()
        },
    }
    archive = io.BytesIO()
    np.savez(archive, np.array({**common, "Nodes": {k: _encode(v, np.asarray) for k, v in record.nodes.items()}}))
    nodes = {name: _encode(node, lambda values: values.tolist()) for name, node in record.nodes.items()}
    if record.mode == files.MEASURED:
        files.write_looked_at(path, record.looked_at)
    files.replace(Path(f"{path}.npz"), archive.getvalue())
    files.replace(Path(f"{path}.json"), json.dumps({**common, "Nodes": nodes, **extra}).encode())
    return path


def _encode(node: files.Node, encode: Any) -> dict[str, Any]:
    stored: dict[str, Any] = {"inputs": [encode(values) for values in node.inputs]}
    if node.outputs:
        stored["outputs"] = [encode(values) for values in node.outputs]
    if node.params:
        stored["params"] = {
            name: {axis: encode(v) for axis, v in value.items()} if isinstance(value, dict) else encode(value)
            for name, value in node.params.items()
        }
    return stored
