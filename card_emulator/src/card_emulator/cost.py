"""How long a card takes: estimates from what was counted, with the origin of every constant.

A step is bounded by memory or by arithmetic, and near the crossing by both; a kernel, a launch and a wait take a fixed
time each. The shares of a card's peaks and the times of kernels were fitted on half of the cells measured on an H100,
of two models; they predict 26 of the other 28 cells to within 15 %, the two to within 18 %.
On a Gaudi nothing was measured: its figures are predictions, good for comparing two programs on one card.
"""

from __future__ import annotations

from dataclasses import dataclass

from card_emulator.counters import Tally
from card_emulator.names import GAUDI2, GAUDI3


@dataclass(frozen=True, kw_only=True)
class Card:
    memory_bandwidth: float
    """Bytes a second, as published."""
    matrix_flops: float
    """Operations a second of the matrix engines in bfloat16, dense, as published."""
    host_bandwidth: float
    """Bytes a second and direction."""
    memory: float
    """Bytes."""
    is_measured: bool = False
    """Whether the cost model was held against measurements of such a card."""


CARDS = {
    # Intel's Gaudi 3 slides at Hot Chips 2024, for both; they give the host's bandwidth for both directions together.
    GAUDI2: Card(memory_bandwidth=2.46e12, matrix_flops=432e12, host_bandwidth=32e9, memory=96e9),
    GAUDI3: Card(memory_bandwidth=3.67e12, matrix_flops=1835e12, host_bandwidth=64e9, memory=128e9),
    # NVIDIA's data sheets of the SXM cards, without sparsity.
    "h100": Card(memory_bandwidth=3.35e12, matrix_flops=989e12, host_bandwidth=64e9, memory=80e9, is_measured=True),
    "h200": Card(memory_bandwidth=4.8e12, matrix_flops=989e12, host_bandwidth=64e9, memory=141e9, is_measured=True),
}

# Fitted: see above.
MEMORY_SHARE = 0.918
MATRIX_SHARE = 0.797
"""Of matrices so wide that their edges do not count;"""
HALF_WIDTH = 1710
"""half of it where hidden states have so many numbers."""
KERNEL_SECONDS = 2.8e-6
"""What a kernel adds that starts before the one ahead of it has ended,"""
LATE_KERNEL_SECONDS = 6.4e-6
"""and one among kernels that do not: the gap after it, and its first and last instances, which do not fill the card."""
USUAL_WIDTH = 4096
"""Of models whose width is not known."""
SHARPNESS = 3
"""Memory and arithmetic overlap: their times are added as a norm of this degree, which is nearly the larger one."""
# Starting a recipe or graph, and waiting for one from Python. Unverified: the order of magnitude of any PCIe card.
LAUNCH_SECONDS = 20e-6
HOST_WAIT_SECONDS = 50e-6
# Putting one operation into the pending graph of lazy mode; replays do not pay it. Unverified.
LAZY_OP_SECONDS = 10e-6
# Compiling a recipe of a decode graph. vllm-gaudi (performance_tuning.md) warms up an 8B model with a marker after each
# layer: 47 more decode graphs, of three recipes each, took 17 s longer. Those of prompt chunks take longer.
RECIPE_SECONDS = (49 - 32) / (48 - 1) / 3


def card_named(name: str) -> Card:
    if name not in CARDS:
        raise ValueError(f"the card is one of {', '.join(CARDS)}, not {name!r}")
    return CARDS[name]


def basis_of(card_name: str) -> str:
    """What an estimate for this card rests on."""
    if card_named(card_name).is_measured:
        return "the cost model was held against measured steps of this card"
    return "a prediction from published peaks; nothing was run on this card"


def kernels_seconds(number: int, *, start_early: bool) -> float:
    """What so many kernels, one after the other, add to what they read and compute."""
    return number * (KERNEL_SECONDS if start_early else LATE_KERNEL_SECONDS)


def step_seconds(counters: Tally, card_name: str, *, kernels_s: float = 0.0, width: int = USUAL_WIDTH) -> float:
    """Estimate of one step's time, compiles left out. `counters` is one step's tally, or a mean of several.
    `kernels_s`: what its kernels add; 0 if they are not known, as in a Gaudi's fused recipes. `width`: of hidden
    states."""
    card = card_named(card_name)
    memory = counters.bytes_moved / (card.memory_bandwidth * MEMORY_SHARE)
    arithmetic = counters.flops / (card.matrix_flops * MATRIX_SHARE * width / (width + HALF_WIDTH))
    work = (memory**SHARPNESS + arithmetic**SHARPNESS) ** (1 / SHARPNESS)
    transfers = (counters.upload_bytes + counters.download_bytes) / card.host_bandwidth
    waits = (counters.host_reads + counters.syncs + counters.fallbacks) * HOST_WAIT_SECONDS
    launches = counters.launches * LAUNCH_SECONDS + kernels_s
    return work + transfers + waits + launches + counters.stray_ops * LAZY_OP_SECONDS
