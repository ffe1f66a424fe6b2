"""The parts of torch that Habana's bridge replaces: the `torch.compile` backend and random number generators."""

from __future__ import annotations

from typing import Any

import torch

from card_emulator.card import DEVICE
from card_emulator.gaudi.compiled import BACKEND, hpu_backend
from card_emulator.guard import patch


def _register_backend() -> None:
    from torch._dynamo.backends.registry import _BACKENDS, register_backend  # this import takes a second

    if BACKEND not in _BACKENDS:
        register_backend(hpu_backend, name=BACKEND)


def _patched_compile(original: Any) -> Any:
    """Register the backend when `torch.compile` is first called. Even in lazy mode, vllm-gaudi's decorators refer to
    the backend (platform.py, set_torch_compile)."""

    def compile(*args: Any, **kwargs: Any) -> Any:
        _register_backend()
        return original(*args, **kwargs)

    return compile


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """A CPU generator that reports the card as its device. All random numbers are generated on the host."""

    _where: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        where = torch.device(device)
        if where.type != DEVICE.where.type:
            return torch._C.Generator(where)
        generator: Any = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        generator._where = DEVICE.where
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._where


def install() -> None:
    if DEVICE.lazy:
        patch(torch, "compile", _patched_compile)
    else:
        _register_backend()
    setattr(torch, "Generator", Generator)  # noqa: B010
