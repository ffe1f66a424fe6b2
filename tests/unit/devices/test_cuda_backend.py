"""The GPU backend beyond tests/conformance: uploads and downloads do not wait."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cuda


@pytest.fixture
def backend() -> Iterator[Any]:
    from vllm_gaudi_spec.devices.cuda.backend import make_backend

    with torch.inference_mode():
        yield make_backend()


def test_uploads_and_downloads(backend: Any) -> None:
    read = backend.memory.num_host_syncs
    torch.cuda.set_sync_debug_mode("error")
    try:
        for dtype in (torch.int32, torch.int64, torch.float32):
            host = torch.arange(1000).to(dtype)
            there = backend.memory.upload(host)
            host.fill_(0)
            waits = backend.memory.start_download(there)
            there.fill_(0)
            assert torch.equal(waits(), torch.arange(1000).to(dtype))
            assert torch.equal(backend.memory.download(there), torch.zeros(1000, dtype=dtype))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert backend.memory.num_host_syncs - read == 6
