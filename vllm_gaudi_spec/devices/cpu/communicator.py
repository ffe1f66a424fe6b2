"""Collectives between CPU ranks."""

from __future__ import annotations

from vllm_gaudi_spec.devices.common.even_exchange import EvenExchange
from vllm_gaudi_spec.upstream.distributed import CpuCommunicator


class CpuSpecCommunicator(EvenExchange, CpuCommunicator):
    """vLLM's CPU communicator, which uses shared memory or Gloo, with an additional token exchange."""
