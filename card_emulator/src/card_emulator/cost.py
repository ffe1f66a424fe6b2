"""Estimate how long a card takes from what was counted, with the origin of every constant.

A step is bounded by memory or by arithmetic, and near the crossing by both; a launch and a wait take a fixed time each.
The share of a card's arithmetic was fitted on cells measured on an H100. Nothing was measured on a Gaudi: its figures
are predictions, good for comparing two programs on one card.
"""

from __future__ import annotations

from dataclasses import dataclass

from card_emulator.counters import Tally
from card_emulator.names import GAUDI2, GAUDI3


@dataclass(frozen=True, kw_only=True)
class Card:
    memory_bandwidth: float
    """Bytes per second that the graph compiler plans with, which is 0.85 of the peak."""
    matrix_flops: float
    """Published operations per second of the matrix engines, for dense bfloat16."""
    host_bandwidth: float
    """Bytes per second in each direction."""


CARDS = {
    # Memory: HabanaAI/Intel_Gaudi3_Software, hal_reader/gaudi2/hal.h:82 and gaudi3/hal.h:123, in units of 2**30 bytes.
    # Others: Intel's Gaudi 3 slides at Hot Chips 2024; they give the host's bandwidth for both directions together.
    GAUDI2: Card(memory_bandwidth=1945 * 2**30, matrix_flops=432e12, host_bandwidth=32e9),
    GAUDI3: Card(memory_bandwidth=2918 * 2**30, matrix_flops=1835e12, host_bandwidth=64e9),
}

# Fitted: see above.
MATRIX_SHARE = 0.797 * 4096 / (4096 + 1710)
"""The share for hidden states of size 4,096. It falls with the width, since narrower matrices have more edges."""
SHARPNESS = 3
"""Memory and arithmetic overlap, so their times are combined by a norm of this degree, which is close to the larger
one."""
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


def step_seconds(counters: Tally, card_name: str) -> float:
    """Return an estimate of one step's time, without compilation.

    `counters` is one step's tally, or a mean of several.
    """
    card = card_named(card_name)
    memory = counters.bytes_moved / card.memory_bandwidth
    arithmetic = counters.flops / (card.matrix_flops * MATRIX_SHARE)
    work = (memory**SHARPNESS + arithmetic**SHARPNESS) ** (1 / SHARPNESS)
    transfers = (counters.upload_bytes + counters.download_bytes) / card.host_bandwidth
    waits = (counters.host_reads + counters.syncs + counters.fallbacks) * HOST_WAIT_SECONDS
    launches = counters.launches * LAUNCH_SECONDS
    return work + transfers + waits + launches + counters.stray_ops * LAZY_OP_SECONDS
