"""The cost model of `gaudi-spec estimate` beside measured cells: fits its constants, and predicts the cells left out.

python benchmarks/cost_model.py --json .bench/cost_model.json

cost_cells.json holds milliseconds measured on two GPUs with dummy weights: of an H100 steps of an 8B-shaped Llama and a
1.5B-shaped one, rounds of a 0.5B-shaped drafter and prompts of 512 tokens (2026-11-27; of the larger model's prompts,
the tables of docs/performance.md), of an H200 those tables (2026-11-22). Every other cell of the H100 is fitted; the
rest of them, and all of the H200, are predicted.

python benchmarks/cost_model.py --measured .bench/verify.json .bench/end_to_end.json .bench/cuda_upstream.json

takes the cells of a card from reports of those benchmarks (8b and 1.5b, this platform) in place of the older ones,
writes them down, and fits that card.
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
FITTED_CARD = "h100"
CARD_NAMES = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
CONSTANTS = {
    "MEMORY_SHARE": 0.85,
    "MATRIX_SHARE": 0.6,
    "HALF_WIDTH": 500,
    "KERNEL_SECONDS": 3e-6,
    "LATE_KERNEL_SECONDS": 5e-6,
}
"""Where a fit begins."""
PROMPT = 512
SIZES = ("8b", "1.5b")


class Cell(NamedTuple):
    card: str
    part: str
    batch: int
    context: int
    num_drafts: int
    ms: float
    size: str = "8b"
    """Of the target; its drafter has the shape that `dummy.DRAFTERS` gives it."""

    def predicted_ms(self) -> float:
        target, drafter = outline(self.size), outline(dummy.DRAFTERS[self.size])
        pair = Pair(target=target, method=DRAFT_MODEL, drafter=drafter, num_drafts=max(self.num_drafts, 1))
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
        width=shape["hidden_size"],
        heads=shape["num_attention_heads"],
        head_size=shape["head_dim"],
        kv_values=2 * shape["num_key_value_heads"] * shape["head_dim"],
        vocabulary=shape["vocab_size"],
    )


def every_cell() -> list[Cell]:
    return [Cell(**cell) for cell in json.loads(CELLS.read_text())]


def cells(fitted_card: str = FITTED_CARD) -> tuple[list[Cell], list[Cell]]:
    """Those that are fitted, and those that are held out: of each part and batch size, every other one."""
    every = every_cell()
    on_fitted = sorted(
        (cell for cell in every if cell.card == fitted_card),
        key=lambda cell: (cell.size, cell.part, cell.batch, cell.context, cell.num_drafts),
    )
    return on_fitted[::2], on_fitted[1::2] + [cell for cell in every if cell.card != fitted_card]


# ---- from reports --------------------------------------------------------------------------------------


def cells_of(report: dict[str, Any]) -> list[Cell]:
    """What a report of verify.py, end_to_end.py or cuda_upstream.py measured."""
    if report["size"] not in SIZES:
        raise RuntimeError(f"a report of size {report['size']}; the cells are of {', '.join(SIZES)}")
    name = report["machine"].get("accelerator")
    if name not in CARD_NAMES:
        raise RuntimeError(f"a report of {name}; there are figures of {', '.join(CARD_NAMES)}")
    card, found = CARD_NAMES[name], {}
    for row in report["rows"]:
        for cell in _cells_of_row(card, row, report):
            cell = cell._replace(size=report["size"])
            found.setdefault(cell._replace(ms=0), cell)  # several rows repeat a plain step
    return list(found.values())


def _cells_of_row(card: str, row: dict[str, Any], report: dict[str, Any]) -> Iterator[Cell]:
    if "verify_ratio" in row:
        yield Cell(card, "plain", row["batch"], row["context"], 0, round(row["plain_ms"], 3))
        yield Cell(card, "verify", row["batch"], row["context"], row["k"], round(row["verify_ms"], 3))
    elif "draft_ms" in row:
        # Programs are run again alone after half of the steps.
        plain, drafted = (
            report["prompt"] + round(length * report["steps"] / 2) for length in (1, row["tokens_per_step"])
        )
        yield Cell(card, "plain", row["batch"], plain, 0, round(row["plain_ms"], 3))
        yield Cell(card, "verify", row["batch"], drafted, report["k"], round(row["verify_ms"], 3))
        yield Cell(card, "draft", row["batch"], drafted, report["k"], round(row["draft_ms"], 3))
    elif row["method"] == "no speculation" and row["prompt"] == PROMPT:
        for cell in row["cells"]:
            if cell["sampling"] == "greedy":
                ms = round(cell["prompt_ms"]["ours"], 1)
                yield Cell(card, "prompt and 16 tokens", cell["batch"], PROMPT + 8, 0, ms)


def take_measured(paths: list[Path]) -> str:
    """Write the cells of these reports in place of the card's older ones; returns the card. Prompts are of steps of
    16,384 tokens, those of older cells of 8,192."""
    new = [cell for path in paths for cell in cells_of(json.loads(path.read_text()))]
    cards = {cell.card for cell in new}
    if len(cards) != 1:
        raise RuntimeError(f"reports of {', '.join(sorted(cards)) or 'no cells'}; give those of one card")
    every = [cell for cell in every_cell() if cell.card not in cards] + new
    lines = ",\n".join(f"  {json.dumps(cell._asdict())}" for cell in every)
    CELLS.write_text(f"[\n{lines}\n]\n")
    return cards.pop()


# ---- the fit -------------------------------------------------------------------------------------------


def fit(fitted: list[Cell]) -> dict[str, float]:
    """Least squares of the logarithms of the ratios, large ones counted less."""
    from scipy.optimize import least_squares

    before = {name: getattr(cost, name) for name in CONSTANTS}

    def apart(logs: Any) -> list[float]:
        for name, value in zip(CONSTANTS, logs, strict=True):
            setattr(cost, name, math.exp(value))
        return [math.log(cell.ratio()) for cell in fitted]

    try:
        found = least_squares(apart, [math.log(value) for value in CONSTANTS.values()], loss="soft_l1")
    finally:
        for name, value in before.items():
            setattr(cost, name, value)
    return {name: math.exp(value) for name, value in zip(CONSTANTS, found.x, strict=True)}


def rows_of(held_out: list[Cell]) -> Iterator[dict[str, Any]]:
    for cell in held_out:
        yield {**cell._asdict(), "predicted_ms": cell.predicted_ms(), "ratio": cell.ratio()}


def main() -> int:
    parser: argparse.ArgumentParser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measured", type=Path, nargs="+", metavar="FILE", help="reports to take the cells of a card from"
    )
    common.add_json(parser)
    options = parser.parse_args()
    fitted, held_out = cells(take_measured(options.measured) if options.measured else FITTED_CARD)
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
