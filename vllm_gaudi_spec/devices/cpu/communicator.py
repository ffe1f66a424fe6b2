"""Collectives between CPU ranks: vLLM's, over shared memory or gloo, and what those lack."""

from __future__ import annotations

from vllm_gaudi_spec.devices.common.even_exchange import EvenExchange
from vllm_gaudi_spec.upstream.distributed import CpuCommunicator


class CpuSpecCommunicator(EvenExchange, CpuCommunicator):
    """The first brings what the second lacks."""
