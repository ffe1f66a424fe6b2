"""Estimate the duration of a step on a real card from the counters.

Memory accesses and arithmetic overlap, so the slower of the two dominates. Each launch and each wait adds a fixed time.
The fraction of peak arithmetic was fitted to measurements on an H100. Nothing was measured on a Gaudi, so use the
estimates only to compare programs on the same card.
"""

from __future__ import annotations

from dataclasses import dataclass

from card_emulator.counters import Tally
from card_emulator.names import GAUDI2, GAUDI3


@dataclass(frozen=True, kw_only=True)
class Card:
    memory_bandwidth: float
    """The bandwidth that the graph compiler assumes, in bytes per second. This is 0.85 of the peak."""
    matrix_flops: float
    """The published dense bfloat16 rate of the matrix engines, in operations per second."""
    host_bandwidth: float
    """The bandwidth between host and card in each direction, in bytes per second."""


CARDS = {
    # Memory: HabanaAI/Intel_Gaudi3_Software, hal_reader/gaudi2/hal.h:82 and gaudi3/hal.h:123, in units of 2**30 bytes.
    # All other values: Intel's Gaudi 3 slides at Hot Chips 2024. Their host bandwidth is the sum of both directions.
    GAUDI2: Card(memory_bandwidth=1945 * 2**30, matrix_flops=432e12, host_bandwidth=32e9),
    GAUDI3: Card(memory_bandwidth=2918 * 2**30, matrix_flops=1835e12, host_bandwidth=64e9),
}

# Fitted to measurements on an H100; see the module's docstring.
MATRIX_SHARE = 0.797 * 4096 / (4096 + 1710)
"""The fraction of peak arithmetic that models with a hidden size of 4,096 reach. It would be lower for smaller
models."""
SHARPNESS = 3
"""The degree of the norm that combines the times for memory accesses and arithmetic. The norm is close to the larger of
the two times."""
# The times to launch a recipe or graph from Python and to wait for it. Not verified, but typical of a PCIe card.
LAUNCH_SECONDS = 20e-6
HOST_WAIT_SECONDS = 50e-6
# The time to add an operation to the pending graph in lazy mode. Replays avoid this cost. Not verified.
LAZY_OP_SECONDS = 10e-6
# The time to compile a recipe of a decode graph. In vllm-gaudi's guide (performance_tuning.md), 47 more decode graphs
# of three recipes each took 17 s, with a marker after each layer of an 8B model. Prefill recipes take longer.
RECIPE_SECONDS = (49 - 32) / (48 - 1) / 3


def card_named(name: str) -> Card:
    if name not in CARDS:
        raise ValueError(f"the card must be one of {', '.join(CARDS)}, not {name!r}")
    return CARDS[name]


def step_seconds(counters: Tally, card_name: str) -> float:
    """Return the estimated duration of the step with these counters, without compilation."""
    card = card_named(card_name)
    memory = counters.bytes_moved / card.memory_bandwidth
    arithmetic = counters.flops / (card.matrix_flops * MATRIX_SHARE)
    work = (memory**SHARPNESS + arithmetic**SHARPNESS) ** (1 / SHARPNESS)
    transfers = (counters.upload_bytes + counters.download_bytes) / card.host_bandwidth
    waits = (counters.host_reads + counters.syncs + counters.fallbacks) * HOST_WAIT_SECONDS
    launches = counters.launches * LAUNCH_SECONDS
    return work + transfers + waits + launches + counters.stray_ops * LAZY_OP_SECONDS
