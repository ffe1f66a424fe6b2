"""Reads measurement and scale files in the layout of Intel Neural Compressor (INC). `calibration/` writes these files.

If P is `dump_stats_path` in QUANT_CONFIG and there are W ranks, these files exist for each rank r:

    P_hooks_maxabs_r_W.json, .npz            measurements: the largest |x| of each module's tensors
    P_hooks_maxabs_r_W_mod_list.json         the names of all measured modules
    P_hooks_maxabs_METHOD_r_W.json, .npz     the scales that `scale_method` METHOD derives from the measurements

The .json and .npz files contain the same values. INC reads the .npz file, which contains a pickle. Unpickling runs the
code in a file, so this module reads the .json file and only checks that the .npz file is complete and harmless. INC
reads only the key `Nodes`. The other keys are additions: `Model` (a fingerprint), `Linears` (how weights are sharded
across ranks), and, for scales, `Device`.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_gaudi_spec.environment import cached_files
from vllm_gaudi_spec.environment.cached_files import stays_inside
from vllm_gaudi_spec.quantization.pickles import list_foreign_calls

MEASURED = "DynamicRange"
SCALED = "Scale"
_LOOKED_AT = "_mod_list.json"
# The permissions of new files. Everyone can read them, because the server may run as a different user.
_RIGHTS = 0o644
_ARCHIVES = (b"PK\3\4", b"PK\5\6")
"""The first bytes of files that NumPy reads as archives."""


class QuantFilesError(ValueError):
    """Raised for unusable measurement or scale files. The message names the files and the reason."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a linear layer's weight that are sharded across ranks: q, k, v, gate, or up."""

    rows: int
    heads: int = 0
    """The number of heads, or 0 if the rows can be split between any two rows. If there are more ranks than heads,
    several ranks have copies of the same head."""


@dataclass(frozen=True)
class LinearShape:
    """How the weight of a linear layer, [rows, columns], is sharded across ranks. Sizes are totals across all ranks."""

    axis: Literal["rows", "columns", "whole"]
    parts: tuple[Part, ...]
    columns: int


@dataclass
class Node:
    """The measurements or scales of one module.

    Maxima are [1, 1] for a whole tensor, or [channels, 1] for the channels of a weight. Scales are [] or [channels].
    """

    inputs: list[np.ndarray]
    outputs: list[np.ndarray] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    """Values for parameters. The item `weight` is an array or, for scales of channels, {0: output scales, 1: input
    scales}."""

    def arrays(self) -> Iterator[np.ndarray]:
        yield from self.inputs
        yield from self.outputs
        for value in self.params.values():
            yield from value.values() if isinstance(value, dict) else [value]


@dataclass
class Record:
    rank: int
    world: int
    mode: str
    nodes: dict[str, Node]
    looked_at: list[str] = field(default_factory=list)
    """The names of all measured modules. `nodes` contains only modules for which there are values."""
    model: str = ""
    linears: dict[str, LinearShape] = field(default_factory=dict)
    device: str = ""
    """The card for whose FP8 range scales were computed (gaudi2 or gaudi3), or empty for measurements."""


# ---- names -------------------------------------------------------------------------------------------


def stem(prefix: str | Path, rank: int, world: int, method: str = "") -> Path:
    """Return the path, without a suffix, of measurement files or, if `method` is given, of the scale files for it."""
    return Path(f"{prefix}_hooks_maxabs{'_' + method.upper() if method else ''}_{rank}_{world}")


def find_ranks(prefix: str | Path, method: str = "") -> dict[int, set[int]]:
    """Return the ranks for which files exist, keyed by world size."""
    prefix = Path(prefix)
    named = re.escape(stem(prefix.name, 0, 1, method).name.removesuffix("_0_1"))
    found: dict[int, set[int]] = {}
    for path in prefix.parent.glob("*.json") if prefix.parent.is_dir() else []:
        if match := re.fullmatch(rf"{named}_(\d+)_(\d+)\.json", path.name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    return found


# ---- reading -----------------------------------------------------------------------------------------


def read_world(prefix: str | Path, world: int | None = None, method: str = "") -> list[Record]:
    """Read the files of all ranks, which must belong to the same model. `world` is required only if there are files for
    several world sizes."""
    what = "scale" if method else "measurement"
    found = find_ranks(prefix, method)
    if not found:
        raise QuantFilesError(f"no {what} files: {stem(prefix, 0, world or 1, method)}.json is missing")
    if world is None and len(found) > 1:
        raise QuantFilesError(f"{what} files of several world sizes at {prefix}: choose one of {sorted(found)}")
    world = world or next(iter(found))
    if world not in found:
        raise QuantFilesError(f"{what} files at {prefix} are for world size {sorted(found)[0]}, not {world}")
    records = [read(stem(prefix, rank, world, method)) for rank in range(world)]
    for record in records[1:]:
        check_same_model(records[0], record, f"rank {record.rank} at {prefix}")
    return records


def read(path: Path) -> Record:
    """Read the files of one rank. `path` is their path without a suffix."""
    written = Path(f"{path}.json")
    for part in (written, Path(f"{path}.npz"), Path(f"{path}{_LOOKED_AT}")):
        _check_inside_folder(part)
    try:
        stored = json.loads(written.read_text())
        record = _decode(stored, path)
    except FileNotFoundError:
        raise QuantFilesError(f"{written} is missing") from None
    except OSError as error:
        raise QuantFilesError(f"{written} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, QuantFilesError):
            raise
        raise QuantFilesError(f"{written} is truncated or not such a file ({type(error).__name__}: {error})") from None
    _check_whole(Path(f"{path}.npz"))
    return record


def check_same_model(expected: Record, other: Record, what: str) -> None:
    """Raise QuantFilesError if files that belong together were measured on different models."""
    if expected.model and other.model and expected.model != other.model:
        raise QuantFilesError(f"{what} was measured on another model ({other.model}, not {expected.model})")
    missing = sorted(set(expected.looked_at) ^ set(other.looked_at))
    if missing:
        raise QuantFilesError(f"{what} was measured on another model: {missing[0]} is in only one of the two")


def _decode(stored: Mapping[str, Any], path: Path) -> Record:
    rank, world = (int(part) for part in path.name.rsplit("_", 2)[1:])
    if stored["LocalRank"] not in (None, -1, rank):
        raise QuantFilesError(f"{path}.json is of rank {stored['LocalRank']}: the file was renamed")
    nodes = {name: _decode_node(node) for name, node in stored["Nodes"].items()}
    for name, node in nodes.items():
        if not all(np.isfinite(values).all() and (values >= 0).all() for values in node.arrays()):
            raise QuantFilesError(f"{path}.json has values that are not maxima: {name}")
    listed = Path(f"{path}{_LOOKED_AT}")
    return Record(
        rank=rank,
        world=world,
        mode=stored["Mode"],
        nodes=nodes,
        looked_at=json.loads(listed.read_text()) if listed.exists() else list(nodes),
        model=stored.get("Model", ""),
        linears={name: _decode_shape(shape) for name, shape in stored.get("Linears", {}).items()},
        device=stored.get("Device", ""),
    )


def _decode_node(node: Mapping[str, Any]) -> Node:
    params = {}
    for name, value in (node.get("params") or {}).items():
        by_axis = isinstance(value, dict)
        params[name] = {int(axis): _array(v) for axis, v in value.items()} if by_axis else _array(value)
    return Node(
        inputs=[_array(value) for value in node.get("inputs") or []],
        outputs=[_array(value) for value in node.get("outputs") or []],
        params=params,
    )


def _decode_shape(shape: Mapping[str, Any]) -> LinearShape:
    parts = tuple(Part(rows, heads) for rows, heads in shape["parts"])
    return LinearShape(shape["axis"], parts, shape["columns"])


def _array(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def check_harmless(prefix: str | Path) -> None:
    """Check all .npz files with the given prefix before INC reads them."""
    prefix = Path(prefix)
    for path in sorted(prefix.parent.glob("*.npz")):
        if path.name.startswith(prefix.name):
            _check_inside_folder(path)
            _check_whole(path)


def _check_inside_folder(path: Path) -> None:
    if not stays_inside(path):
        raise QuantFilesError(f"{path} is a link that points out of its folder; copy the file there")


def _check_whole(path: Path) -> None:
    """Verify a zip archive's checksums, and reject the archive if its pickles, which INC will load, call unknown
    functions."""
    try:
        with path.open("rb") as file:
            # NumPy checks the beginning of a file, but zipfile finds an archive even if other data precedes it.
            if file.read(4) not in _ARCHIVES:
                raise zipfile.BadZipFile("it does not begin as an archive does")
            archive = zipfile.ZipFile(file)
            damaged = archive.testzip()
            for name in [] if damaged else archive.namelist():
                with archive.open(name) as member:
                    foreign = next(list_foreign_calls(member), None)
                if foreign is not None:
                    raise QuantFilesError(f"{path} would call {foreign} when it is read; do not use it")
    except FileNotFoundError:
        raise QuantFilesError(f"{path} is missing") from None
    except (OSError, zipfile.BadZipFile, EOFError, ValueError) as error:
        if isinstance(error, QuantFilesError):
            raise
        raise QuantFilesError(f"{path} is truncated or damaged ({error})") from None
    if damaged:
        raise QuantFilesError(f"{path} is damaged")


# ---- writing -----------------------------------------------------------------------------------------


def write_looked_at(path: Path, names: Sequence[str]) -> None:
    """Write the list of modules that a rank has measured. `path` is the path of the rank's files without a suffix."""
    replace(Path(f"{path}{_LOOKED_AT}"), json.dumps(list(names), indent=4).encode())


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its folder if necessary. If the path is a link, the link itself is
    replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cached_files.replace(path, content, _RIGHTS)
    except OSError as error:
        raise QuantFilesError(f"{path} cannot be written: {error.strerror}") from None
