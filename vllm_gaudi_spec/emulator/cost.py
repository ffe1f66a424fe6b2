"""How long a real card might take: estimates from what was counted, with the origin of every constant.

A step is bounded by memory or by arithmetic, whichever takes longer, plus a fixed time for each launch and each wait.
Good for comparing two programs on one card; no measurement of either card went into it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_gaudi_spec.config import GAUDI2, GAUDI3
from vllm_gaudi_spec.emulator.counters import Tally


@dataclass(frozen=True)
class Card:
    memory_bandwidth: float
    """Bytes a second. Intel's Gaudi 3 slides at Hot Chips 2024, for both cards."""
    matrix_flops: float
    """BF16 operations a second of the matrix engines. The same slides."""
    host_bandwidth: float
    """Bytes a second and direction, half of what the same slides give for both."""


CARDS = {
    GAUDI2: Card(memory_bandwidth=2.46e12, matrix_flops=432e12, host_bandwidth=32e9),
    GAUDI3: Card(memory_bandwidth=3.67e12, matrix_flops=1835e12, host_bandwidth=64e9),
}

# Share of the peak that decoding reaches. Unverified: a common rule of thumb for accelerators.
EFFICIENCY = 0.6
# Starting a recipe, and waiting for one from Python. Unverified: the order of magnitude of any PCIe accelerator.
LAUNCH_SECONDS = 20e-6
HOST_WAIT_SECONDS = 50e-6
# Putting one operation into the pending graph of lazy mode; replays do not pay it. Unverified.
LAZY_OP_SECONDS = 10e-6


def _card(generation: str) -> Card:
    if generation not in CARDS:
        raise ValueError(f"generation is one of {', '.join(CARDS)}, not {generation!r}")
    return CARDS[generation]


def step_seconds(counters: Tally, generation: str) -> float:
    """Estimate of one step's time, compiles left out. `counters` is one step's tally, or a mean of several."""
    card = _card(generation)
    memory = counters.bytes_moved / (card.memory_bandwidth * EFFICIENCY)
    arithmetic = counters.flops / (card.matrix_flops * EFFICIENCY)
    transfers = (counters.upload_bytes + counters.download_bytes) / card.host_bandwidth
    waits = (counters.host_reads + counters.syncs + counters.fallbacks) * HOST_WAIT_SECONDS
    launches = counters.launches * LAUNCH_SECONDS
    return max(memory, arithmetic) + transfers + waits + launches + counters.stray_ops * LAZY_OP_SECONDS
