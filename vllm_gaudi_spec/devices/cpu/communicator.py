"""Collectives between CPU ranks: vLLM's own, over shared memory or gloo, and the token exchange that vLLM lacks."""

from __future__ import annotations

from vllm_gaudi_spec.devices.common.even_exchange import EvenExchange
from vllm_gaudi_spec.upstream.distributed import CpuCommunicator


class CpuSpecCommunicator(EvenExchange, CpuCommunicator):
    """vLLM's communicator, extended with the token exchange from `EvenExchange`."""
