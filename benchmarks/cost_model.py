"""The cost model of `gaudi-spec estimate` beside measured cells: fits its constants, and predicts the cells left out.

python benchmarks/cost_model.py --json .bench/cost_model.json

cost_cells.json holds milliseconds measured on 2026-11-22 on two GPUs with dummy weights, an 8B-shaped Llama and a
0.5B-shaped drafter: of an H200 the tables of docs/performance.md, of an H100 throughput and prompts of 512 tokens.
Every other cell of the H200 is fitted; the rest of them, and all of the H100, are predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
import dummy
import torch

from vllm_gaudi_spec.drafting.table import DRAFT_MODEL
from vllm_gaudi_spec.emulator import cost
from vllm_gaudi_spec.tools.estimate.outline import Outline
from vllm_gaudi_spec.tools.estimate.times import Pair
from vllm_gaudi_spec.tools.io.command_line import Parser

CELLS = Path(__file__).with_name("cost_cells.json")
FITTED_CARD = "h200"
CONSTANTS = ("MEMORY_SHARE", "MATRIX_SHARE", "KERNEL_SECONDS")
PROMPT = 512


class Cell(NamedTuple):
    card: str
    part: str
    batch: int
    context: int
    num_drafts: int
    ms: float

    def predicted_ms(self) -> float:
        pair = Pair(
            target=outline("8b"), method=DRAFT_MODEL, drafter=outline("0.5b"), num_drafts=max(self.num_drafts, 1)
        )
        where = (self.batch, self.context, self.card)
        seconds = {
            "plain": lambda: pair.plain_s(*where),
            "verify": lambda: pair.verify_s(*where),
            "draft": lambda: pair.draft_s(*where),
            # The prompt makes the first token.
            "prompt and 16 tokens": lambda: pair.prompt_s(self.batch, PROMPT, self.card) + 15 * pair.plain_s(*where),
        }
        return 1e3 * seconds[self.part]()

    def ratio(self) -> float:
        return self.predicted_ms() / self.ms


def outline(size: str) -> Outline:
    """Of a dense Llama with an output matrix of its own, as `dummy.write_model` makes it."""
    shape, dtype = dummy.SIZES[size], torch.bfloat16
    read = dummy.weight_bytes(shape, dtype)
    head = shape["vocab_size"] * shape["hidden_size"]
    return Outline(
        weights=read // dtype.itemsize,
        weight_bytes=read,
        memory=read + head * dtype.itemsize,
        head_weights=head,
        layers=shape["num_hidden_layers"],
        heads=shape["num_attention_heads"],
        head_size=shape["head_dim"],
        kv_values=2 * shape["num_key_value_heads"] * shape["head_dim"],
        vocabulary=shape["vocab_size"],
    )


def cells() -> tuple[list[Cell], list[Cell]]:
    """Those that are fitted, and those that are held out."""
    every = [Cell(**cell) for cell in json.loads(CELLS.read_text())]
    on_fitted = [cell for cell in every if cell.card == FITTED_CARD]
    return on_fitted[::2], on_fitted[1::2] + [cell for cell in every if cell.card != FITTED_CARD]


def fit(fitted: list[Cell]) -> dict[str, float]:
    """Least squares of the logarithms of the ratios, large ones counted less."""
    from scipy.optimize import least_squares

    before = {name: getattr(cost, name) for name in CONSTANTS}

    def apart(logs: Any) -> list[float]:
        for name, value in zip(CONSTANTS, logs, strict=True):
            setattr(cost, name, math.exp(value))
        return [math.log(cell.ratio()) for cell in fitted]

    try:
        found = least_squares(apart, [math.log(0.8), math.log(0.5), math.log(3e-6)], loss="soft_l1")
    finally:
        for name, value in before.items():
            setattr(cost, name, value)
    return {name: math.exp(value) for name, value in zip(CONSTANTS, found.x, strict=True)}


def rows_of(held_out: list[Cell]) -> Iterator[dict[str, Any]]:
    for cell in held_out:
        yield {**cell._asdict(), "predicted_ms": cell.predicted_ms(), "ratio": cell.ratio()}


def main() -> int:
    parser: argparse.ArgumentParser = Parser(description=__doc__)
    common.add_json(parser)
    options = parser.parse_args()
    fitted, held_out = cells()
    constants, rows = fit(fitted), list(rows_of(held_out))
    for name, value in constants.items():
        common.log(f"{name}: {value:.3g} fitted on {len(fitted)} cells, {getattr(cost, name):.3g} in use")
    lines = [
        [
            *(str(row[name]) for name in ("card", "part", "batch", "context", "num_drafts")),
            *(f"{row[name]:.2f}" for name in ("ms", "predicted_ms", "ratio")),
        ]
        for row in rows
    ]
    header = ["card", "part", "batch", "context", "k", "measured ms", "predicted ms", "ratio"]
    common.log("\nheld out, with the constants in use\n\n" + common.table(header, lines))
    common.write_json(options.json, {"constants": constants, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
