"""One backend a process: an emulated device changes torch for good. VGS_DEVICE names it."""

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from vllm_gaudi_spec.devices.base import DeviceBackend


class FrontEnd(NamedTuple):
    """What vLLM has of a platform before it starts its engine process."""

    backend: DeviceBackend
    name: str
    total_memory: int
    opened_by: list[str]
    """Calls that would have opened the card."""
    opened: bool


OPENING = ("Stream", "Event", "mem_get_info", "synchronize", "current_stream", "set_device", "empty_cache", "init")


@pytest.fixture(scope="session")
def front_end() -> FrontEnd:
    from vllm.platforms import current_platform

    from vllm_gaudi_spec import device_table

    # The device's software, or what stands in for it, comes with the module.
    chosen = device_table.DEVICES[device_table.choose_device() or "cpu"]
    importlib.import_module(f"vllm_gaudi_spec.devices.{chosen.backend}")
    device, called = getattr(torch, current_platform.device_type), []
    opened = hasattr(device, "is_initialized") and device.is_initialized()
    assert current_platform.device_type == "cpu" or not opened, "tests before these opened the card: run these alone"
    with pytest.MonkeyPatch.context() as patch:
        for name in OPENING:
            if hasattr(device, name):
                patch.setattr(device, name, _noted(name, getattr(device, name), called))
        backend = device_table.load_backend()
        current_platform.import_ir_kernels()
        name, total_memory = current_platform.get_device_name(), current_platform.get_device_total_memory()
    return FrontEnd(backend, name, total_memory, called, backend.traits.captures and device.is_initialized())


def _noted(name: str, original: Any, called: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return original(*args, **kwargs)

    if not isinstance(original, type):
        return call

    # A class stays one: annotations name it.
    class Noted(type(original)):
        __call__ = staticmethod(call)

    return Noted(name, (original,), {})


@pytest.fixture(scope="session")
def backend(front_end: FrontEnd) -> DeviceBackend:
    from vllm.platforms import current_platform

    backend = front_end.backend
    current_platform.set_device(torch.device(backend.traits.torch_device.type, 0))
    current_platform.import_kernels()
    return backend


@pytest.fixture(autouse=True)
def as_in_steps() -> Iterator[None]:
    with torch.inference_mode():
        yield
