"""torch_npu, which gives torch the device "npu" and the process group "hccl".

vLLM names the device before a backend is made, for example in a configuration that another process unpacks. So this is
imported with the platform.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices import choose_device


def torch_npu() -> Any:
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise UnsupportedConfigError(
            f"device ascend needs torch_npu and CANN, which come with Huawei's images ({error}); set VGS_DEVICE to "
            "ascend-emulated or cpu where there is no NPU."
        ) from error


if choose_device() == "ascend-emulated":
    emulator.install_npu()
# Where it is missing or broken, the backend refuses when it is made.
with suppress(UnsupportedConfigError):
    torch_npu()
