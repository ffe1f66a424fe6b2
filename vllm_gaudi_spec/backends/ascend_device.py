"""Gives torch the device "npu". vLLM names it before a backend is made, in a configuration, say, that another process
unpacks. So this is imported with the platform."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.backends import choose_device

if choose_device() == "ascend-emulated":
    emulator.install_npu()

if find_spec("torch_npu") is not None:
    importlib.import_module("torch_npu")
