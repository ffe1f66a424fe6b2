"""Collectives between CPU ranks: vLLM's over shared memory or gloo, and those that they lack."""

from __future__ import annotations

from vllm_gaudi_spec.devices.common.even_exchange import EvenExchange
from vllm_gaudi_spec.upstream.distributed import CpuCommunicator


class CpuSpecCommunicator(EvenExchange, CpuCommunicator):
    """vLLM's communicator with the exchange of `EvenExchange`."""
