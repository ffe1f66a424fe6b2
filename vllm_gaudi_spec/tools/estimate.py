"""`gaudi-spec estimate`: estimates step times on a Gaudi, with constants that also predict published figures.

This project has measured none of these figures, because it has never run on a Gaudi.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from vllm_gaudi_spec.tools.io import output

DESCRIPTION = """\
Estimate the time of decode steps on a Gaudi, with and without drafts. For comparison, the same steps are also estimated
with attention that reads one block at a time and uses float32 scores, and as in vllm-gaudi: with one query per row,
and with contiguous KV that is not copied, which vllm-gaudi uses without a prefix cache. The same constants predict
figures that Intel published. No card is needed: nothing was measured here, and nothing was fitted to the figures.

Examples:
  gaudi-spec estimate
  gaudi-spec estimate --card gaudi3 --json estimate.json

Exit status: 0, or 2 for invalid options.
"""


@dataclass(frozen=True)
class Card:
    bandwidth: float
    """Bytes per second."""
    tpcs: int
    mme_cores: int
    clock: float
    bf16: float
    """Operations per second."""
    fp8: float


CARDS = {
    "gaudi2": Card(1945 * 2**30, 24, 2 * 2, 1.65e9, 432e12, 865e12),
    "gaudi3": Card(2918 * 2**30, 64, 8 * 2, 1.75e9, 1835e12, 1835e12),
}
MME_SHARE = 0.7
TPC_BYTES = 256 / 4
GAPS = 2.1e-3
HANDOFF = 16e-6

_COMPILER = "HabanaAI/Intel_Gaudi3_Software, hal_reader"
EVIDENCE = (
    ("memory, GiB/s", "1945", "2918", f"{_COMPILER}/gaudi2/hal.h:82, gaudi3/hal.h:123; 0.85 of the peak"),
    ("TPCs", "24", "64", f"{_COMPILER}/gaudi2/hal.h:63, gaudi3/hal.h:118"),
    ("cores of matrix engines", "2 x 2", "8 x 2", f"{_COMPILER}/gaudi2/hal.h:65-66, gaudi3/hal.h:86, 117"),
    ("clock, GHz", "1.65", "1.75", "inferred: published operations over engines of 256 x 256"),
    ("bfloat16, FP8, TFLOPS", "432, 865", "1835, 1835", "published by Intel"),
    ("share of that in linear layers", "0.7", "0.7", "assumed"),
    ("bytes per cycle of a TPC", "64", "64", "1CatAI/1Cat-vLLM-Gaudi, measured on a Gaudi 2"),
    ("gaps in a forward pass, ms", "2.1", "2.1", "1CatAI/1Cat-vLLM-Gaudi, measured on a Gaudi 2"),
    ("handoff between engines, us", "16", "16", "1CatAI/1Cat-vLLM-Gaudi, measured on a Gaudi 2; two in an all-reduce"),
)


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    """Number of parameters without the input embeddings, which a step does not read."""
    layers: int
    heads: int
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128256


LLAMA_8B = Model("Llama 3.1 8B", 7.5e9, 32, 32)
LLAMA_70B = Model("Llama 3.1 70B", 69.5e9, 80, 64)

BLOCK = 128
# Bytes read and written per attention score, if adjacent elementwise operations are fused and reductions are not.
_FLOAT32_SCORES, _BFLOAT16_SCORES = 28, 12


@dataclass(frozen=True)
class Way:
    """A way in which decode attention reads KV."""

    name: str
    blocks: int | None
    """Number of blocks per matmul, or None to use `attention.flat.choose_group`."""
    score_bytes: int
    flattens: bool = False
    """Whether each query is a separate row. If so, the KV of a request is read once per query."""
    copies: bool = True
    """Whether blocks are gathered rather than read in place."""


OURS = Way("here", None, _BFLOAT16_SCORES)
IN_PLACE = Way("here, in place", 1, _BFLOAT16_SCORES, copies=False)
BEFORE = Way("block by block", 1, _FLOAT32_SCORES)
FLATTENED = Way("query per row", 1, _BFLOAT16_SCORES, flattens=True)
CONTIGUOUS = Way("and contiguous", 1, _BFLOAT16_SCORES, flattens=True, copies=False)
WAYS = (BEFORE, OURS, IN_PLACE, FLATTENED, CONTIGUOUS)


def estimate_forward(card: Card, model: Model, tokens: int, ranks: int, *, fp8: bool = False) -> float:
    """Return the seconds for a forward pass without its attention."""
    weights = model.parameters * (1 if fp8 else 2) / ranks / card.bandwidth
    operations = 2 * model.parameters * tokens / ranks / ((card.fp8 if fp8 else card.bf16) * MME_SHARE)
    # Logits are written, read in float32, and reduced.
    sampling = tokens * model.vocabulary * 12 / card.bandwidth
    exchanges = 2 * model.layers * 2 * HANDOFF if ranks > 1 else 0.0
    return max(weights, operations) + sampling + GAPS + exchanges


def estimate_attention(card: Card, model: Model, way: Way, rows: int, context: int, queries: int, ranks: int) -> float:
    """Return the seconds for decode attention over paged KV in bfloat16, summed over all layers."""
    from vllm_gaudi_spec.attention.flat import choose_group

    repeats = queries if way.flattens else 1
    num_blocks = rows * -(-context // BLOCK)
    group = way.blocks or choose_group(num_blocks, rows)
    entries = (num_blocks + rows * (group - 1)) // group * repeats
    keys, heads, size = group * BLOCK, model.kv_heads / ranks, model.head_size
    # A gather reads and writes keys and values, which the matmuls then read.
    kv_bytes = (3 if way.copies else 1) * 2 * entries * keys * heads * size * 2
    score_bytes = entries * keys * model.heads / ranks * (queries / repeats) * way.score_bytes
    vectors = score_bytes / min(card.bandwidth, card.tpcs * TPC_BYTES * card.clock)
    # A core needs one cycle per element of the common dimension for up to 256 columns.
    cycles = entries * heads * (size * -(-keys // 256) + keys)
    return model.layers * (kv_bytes / card.bandwidth + vectors + cycles / card.mme_cores / card.clock)


def estimate_step(card: Card, model: Model, way: Way, rows: int, context: int, drafts: int, ranks: int) -> float:
    """Return the seconds for a decode step that verifies drafts, without the time for drafting."""
    attention = estimate_attention(card, model, way, rows, context, drafts + 1, ranks)
    return estimate_forward(card, model, rows * (drafts + 1), ranks) + attention


@dataclass(frozen=True)
class Published:
    """Throughput for static batches, with weights and KV in FP8 (intel.com, model-performance, Gaudi software 1.18)."""

    card: str
    model: Model
    ranks: int
    prompt: int
    answer: int
    rows: int
    tokens_per_second: float

    def predict(self) -> float:
        """Return the predicted number of tokens per second if KV is contiguous and read once."""
        card, model = CARDS[self.card], self.model
        token_bytes = 2 * model.layers * model.kv_heads * model.head_size / self.ranks
        context = self.prompt + self.answer / 2
        step = estimate_forward(card, model, self.rows, self.ranks, fp8=True)
        step += self.rows * context * token_bytes / card.bandwidth
        width = model.heads * model.head_size
        operations = (2 * model.parameters + 2 * model.layers * width * self.prompt) * self.prompt * self.rows
        seconds = self.answer * step + operations / self.ranks / (card.fp8 * MME_SHARE)
        return self.rows * self.answer / seconds


PUBLISHED = tuple(
    Published(card, model, ranks, prompt, answer, rows, speed)
    for card, model, ranks, figures in (
        ("gaudi2", LLAMA_8B, 1, ((2429, 18201), (289, 11138), (179, 2028), (155, 5511))),
        ("gaudi3", LLAMA_8B, 1, ((1536, 24310), (768, 18830), (256, 2652), (364, 7405))),
        ("gaudi3", LLAMA_70B, 2, ((3516, 3711), (450, 5776), (223, 497), (175, 2588))),
        ("gaudi3", LLAMA_70B, 8, ((4000, 15008), (600, 15711), (400, 1600), (600, 8946))),
    )
    for (prompt, answer), (rows, speed) in zip(product((128, 2048), (128, 2048)), figures, strict=True)
)


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "estimate", help="estimate the time of decode steps on a Gaudi, without having one", description=DESCRIPTION
    )
    parser.add_argument("--card", default="gaudi2", choices=tuple(CARDS), help="the card to estimate for")
    output.add_json(parser.add_argument, "all estimates")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if mistake := output.find_mistake("--json", options.json):
        return output.fail("estimate", mistake)
    steps, figures = list_steps(CARDS[options.card]), list_published()
    if options.json != output.STDOUT:
        show(options.card, steps, figures)
    output.write_json({"card": options.card, "constants": EVIDENCE, "steps": steps, "published": figures}, options.json)
    return output.FINE


def list_steps(card: Card) -> list[dict[str, Any]]:
    """Return a row for each model, batch size, context, and number of drafts, with the milliseconds for each method."""
    cells = product(((LLAMA_8B, 1), (LLAMA_70B, 8)), (1, 32, 128), (1024, 4096, 16384), (0, 3, 7))
    return [
        {"model": model.name, "ranks": ranks, "rows": rows, "context": context, "drafts": drafts}
        | {way.name: 1e3 * estimate_step(card, model, way, rows, context, drafts, ranks) for way in WAYS}
        for (model, ranks), rows, context, drafts in cells
    ]


def list_published() -> list[dict[str, Any]]:
    return [asdict(one) | {"model": one.model.name, "predicted": one.predict()} for one in PUBLISHED]


def show(card: str, steps: list[dict[str, Any]], figures: list[dict[str, Any]]) -> None:
    print("Constants\n")
    print("\n".join(output.align([["", *CARDS, "evidence"], *map(list, EVIDENCE)])))
    print(f"\nDecode step on a {card} in bfloat16, ms (a step verifies the drafts; drafting is left out)\n")
    names = [way.name for way in WAYS]
    rows = [["model", "cards", "requests", "context", "drafts", *names]]
    for step in steps:
        sizes = [str(step[name]) for name in ("model", "ranks", "rows", "context", "drafts")]
        rows.append([*sizes, *(f"{step[name]:.1f}".rjust(len(name)) for name in names)])
    print("\n".join(output.align(rows)))
    print("\nTokens per second that Intel published, and predicted with these constants\n")
    rows = [["card", "model", "cards", "prompt", "answer", "requests", "published", "predicted", "ratio"]]
    for one in figures:
        sizes = [str(one[name]) for name in ("card", "model", "ranks", "prompt", "answer", "rows")]
        published, predicted = one["tokens_per_second"], one["predicted"]
        rows.append([*sizes, f"{published:,.0f}", f"{predicted:,.0f}", f"{predicted / published:.2f}"])
    print("\n".join(output.align(rows)))
