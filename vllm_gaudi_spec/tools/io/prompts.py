"""Prompts for measurements: the built-in set, a file or folder of the user, or a dataset from Hugging Face."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.config import in_one_line

SOURCES = "a JSONL file, a text file with a prompt on each line, a folder of text files, or a Hugging Face data set"
# The prompts are of many kinds, because any kind may cause the largest value in a layer.
_BUILT_IN = Path(__file__).with_name("builtin_prompts.jsonl")
_COLUMNS = ("prompt", "text", "question", "instruction", "content")
_MAX_ROWS = 512
"""Maximum number of rows to read from a dataset if no limit is given."""


def load_prompts(source: str | None = None, limit: int | None = None) -> list[str]:
    """Return the first `limit` prompts from a source.

    Args:
        source: None for the built-in set; a folder in which each *.txt file is a prompt; a .jsonl file in which each
            line is a string or an object with a `prompt`, `text`, or `question`; a .txt file with one prompt per line;
            or the name of a Hugging Face dataset, `NAME` or `NAME:SPLIT`, which the package `datasets` loads.

    Raises:
        ValueError: The source cannot be read or contains no prompts.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of prompts must be at least 1, got {limit}")
    if source is None:
        found: Iterable[str] = _from_file(_BUILT_IN)
    elif Path(source).is_dir():
        found = (path.read_text().removesuffix("\n") for path in sorted(Path(source).glob("*.txt")))
    elif source.startswith(("/", ".", "~")) or Path(source).suffix in (".jsonl", ".txt") or Path(source).exists():
        found = _from_file(Path(source))
    else:
        found = _from_hub(source, limit or _MAX_ROWS)
    prompts = list(islice((text for text in found if text.strip()), limit))
    if not prompts:
        raise ValueError(f"{source} has no prompts")
    return prompts


def _from_file(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if path.suffix == ".txt":
            yield line
        elif line.strip():
            try:
                yield _text_of(json.loads(line))
            except ValueError as error:
                raise ValueError(f"prompts: line {number} of {path}: {error}") from None


def _from_hub(name: str, rows: int) -> Iterator[str]:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"prompts: {name} is not a file; to load it as a data set, pip install datasets")
    from datasets import load_dataset

    name, _, split = name.partition(":")
    try:
        yield from (_text_of(row) for row in islice(load_dataset(name, split=split or "train", streaming=True), rows))
    except Exception as error:  # the package, its readers, and the network may raise many types of exceptions
        raise ValueError(f"prompts: data set {name}: {in_one_line(error)}") from None


def _text_of(row: Any) -> str:
    if isinstance(row, str):
        return row
    for column in _COLUMNS:
        if isinstance(row, dict) and isinstance(row.get(column), str):
            return str(row[column])
    raise ValueError(f"expected a string, or an object with one of {', '.join(_COLUMNS)}")
