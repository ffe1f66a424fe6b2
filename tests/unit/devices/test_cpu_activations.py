"""The gated activation on the CPU has the same bits as vLLM's, and does not change its input."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul

from vllm_gaudi_spec.devices.cpu.layers import CpuSiluAndMul


def test_gated_activation_has_the_bits_of_vllm() -> None:
    with set_current_vllm_config(VllmConfig()):
        layer = SiluAndMul()
    assert isinstance(layer, CpuSiluAndMul)
    torch.manual_seed(0)
    for shape in ((1, 12), (33, 2 * 77), (2, 5, 64)):
        x = torch.randn(shape) * 4
        before = x.clone()
        assert torch.equal(layer.forward_cpu(x), SiluAndMul.forward_native(before))
        assert torch.equal(x, before)
