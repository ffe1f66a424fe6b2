"""A candidate, parsed from the command line. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.drafting.table import DRAFT_MODEL, METHODS

_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
NAME_A_MODEL = (
    *(name for name, row in METHODS.items() if (row.has_model and not row.in_target) or "model" in row.options),
    UNIVERSAL_DRAFT,
)
NAME_NONE = tuple(name for name in METHODS if name not in NAME_A_MODEL)


@dataclass(frozen=True)
class Drafter:
    name: str
    config: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Drafter:
        method, _, path = text.rpartition("=")
        if not method and text in NAME_NONE:
            lookup = {name: length for name, length in _LOOKUP.items() if name in METHODS[text].options}
            return cls(text, {"method": text, **lookup})
        method = method or DRAFT_MODEL
        if method not in NAME_A_MODEL or not path or path in NAME_A_MODEL:
            raise argparse.ArgumentTypeError(f"{text!r} is no drafter: write {HOW_TO_WRITE}")
        return cls(method, {"method": method, "model": path})


HOW_TO_WRITE = (
    f"METHOD=MODEL with one of {', '.join(NAME_A_MODEL)}; or {', '.join(NAME_NONE)}; or a model alone for {DRAFT_MODEL}"
)
