"""Copies between host and device, memory, and a model's way to the device."""

import torch
from torch import nn

from tests.conformance.conftest import FrontEnd
from vllm_gaudi_spec.devices.base import DeviceBackend


def test_there_and_back(backend: DeviceBackend) -> None:
    before = backend.memory.num_host_syncs
    tensors = [
        torch.arange(1000, dtype=torch.int32),
        torch.arange(-5, 5),
        torch.randn(3, 4),
        torch.tensor([True, False, True]),
        torch.zeros(0, 3),
        torch.randn(6, 8)[::2, 1:5].contiguous(),
    ]
    for tensor in tensors:
        there = backend.memory.upload(tensor)
        assert there.device.type == backend.traits.torch_device.type
        back = backend.memory.download(there)
        assert back.device.type == "cpu"
        assert torch.equal(back, tensor)
        assert back.dtype == tensor.dtype
    assert backend.memory.num_host_syncs - before == len(tensors), "uploads are not reads"


def test_l05_h02_results_are_on_their_way_before_the_next_step_overwrites_them(backend: DeviceBackend) -> None:
    """Several at a time; each is counted once."""
    graph = backend.graphs.graph(lambda x: x + 1)
    before = backend.memory.num_host_syncs
    arrives = [
        backend.memory.start_download(graph(backend.memory.upload(torch.tensor([10 * i, 20 * i])))) for i in range(4)
    ]
    backend.graphs.step_done()
    for i in (2, 0, 1, 3):
        assert arrives[i]().tolist() == [10 * i + 1, 20 * i + 1]
    assert backend.memory.num_host_syncs - before == 4


def test_s14_memory(backend: DeviceBackend) -> None:
    most = backend.memory.available_memory(0.9, 1)
    assert type(most) is int
    assert most > 0
    assert 0 < backend.memory.available_memory(0.01, 1) < most


def test_drafts_and_sizes(backend: DeviceBackend) -> None:
    from vllm_gaudi_spec.config import MAX_DRAFTS, SUFFIX_DRAFTS

    assert SUFFIX_DRAFTS <= backend.traits.max_drafts <= MAX_DRAFTS
    assert min(backend.traits.prefill_rows) == 1
    assert backend.traits.prefill_step % backend.traits.smallest_prefill == 0
    assert backend.traits.block_size % 16 == 0
    assert backend.weights.fp8_range in (None, "gaudi2", "gaudi3")


def test_a_model_comes_to_the_device(backend: DeviceBackend) -> None:
    """From where vLLM loads it."""
    from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    config = VllmConfig(load_config=LoadConfig())
    current_platform.check_and_update_config(config)
    torch.manual_seed(0)
    with set_current_vllm_config(config), torch.device(config.load_config.device or backend.traits.torch_device):
        model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    plain = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    ids = torch.tensor([3, 9])
    backend.weights.prepare_model(model)
    assert {weight.device.type for weight in model.parameters()} == {backend.traits.torch_device.type}
    found = backend.memory.download(backend.graphs.graph(model.forward)(backend.memory.upload(ids)))
    torch.testing.assert_close(found, plain(ids))
    backend.memory.synchronize()


def test_s28_no_front_end_opens_the_card(front_end: FrontEnd) -> None:
    """What vLLM asks before it starts its engine process: an open card would not be free for that."""
    from vllm.platforms import current_platform

    assert front_end.opened_by == []
    assert not front_end.opened
    assert current_platform.device_type == front_end.backend.traits.torch_device.type
    if front_end.backend.traits.captures:
        assert (front_end.name, front_end.total_memory) == (front_end.backend.traits.name, 0)
    if front_end.backend.traits.torch_device.type == "hpu":
        assert not current_platform.is_pin_memory_available()
