"""A candidate, parsed from the command line. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.drafting.table import DRAFT_MODEL, METHODS

_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
_NEED_NO_MODEL = tuple(name for name, row in METHODS.items() if row.in_target or not row.has_model)


@dataclass(frozen=True)
class Drafter:
    name: str
    config: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Drafter:
        method, _, path = text.rpartition("=")
        if not method and text in _NEED_NO_MODEL:
            return cls(text, _NGRAM if text == "ngram" else {"method": text})
        method = method or DRAFT_MODEL
        if method not in (*METHODS, UNIVERSAL_DRAFT) or not path:
            methods = ", ".join(name for name in (*METHODS, UNIVERSAL_DRAFT) if name not in _NEED_NO_MODEL)
            raise argparse.ArgumentTypeError(
                f"{text!r} is no drafter: write METHOD=MODEL with one of {methods}; {' or '.join(_NEED_NO_MODEL)}; "
                "or a model alone for draft_model"
            )
        return cls(method, {"method": method, "model": path})
