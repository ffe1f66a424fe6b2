"""On a machine with a Gaudi torch loads the bridge by itself, before any of our code runs: what follows from that."""

import os
from pathlib import Path

import pytest

from tests.support.autoload import write_bridge
from tests.support.marks import slow
from tests.support.processes import python_path, run_code

_SCRIPT = """
import os
import torch

assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "hpu"
try:
    torch.accelerator.empty_cache()
except RuntimeError as error:
    print(error)
from vllm_gaudi_spec.device_table import load_backend

print(load_backend().traits.mode, os.environ["PT_HPU_LAZY_MODE"])
from vllm_gaudi_spec.devices.hpu.emulated import make_backend

for mode in "01":
    os.environ["PT_HPU_LAZY_MODE"] = mode
    try:
        print(make_backend().traits.mode)
    except Exception as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("default", "exported", "mode"),
    [(0, None, "compiled"), *slow((1, None, "lazy"), (1, "0", "compiled"), (0, "1", "lazy"))],
)
def test_s03_h15_the_mode_is_that_of_the_import_of_torch(
    default: int, exported: str | None, mode: str, tmp_path: Path
) -> None:
    """Not set, it is the bridge's default, whatever ours is; set after the import, it is refused."""
    write_bridge(tmp_path, default)
    inherited = {name: value for name, value in os.environ.items() if name != "PT_HPU_LAZY_MODE"}
    chosen = {} if exported is None else {"PT_HPU_LAZY_MODE": exported}
    chosen |= {"PYTHONPATH": python_path(tmp_path), "VGS_DEVICE": "hpu-emulated"}
    done = run_code(_SCRIPT, env=inherited | chosen)
    assert done.returncode == 0, done.stderr[-4000:]
    refused, loaded, *asked = done.stdout.splitlines()
    assert refused == "Allocator for hpu is not a DeviceAllocator"
    is_lazy = mode == "lazy"
    assert loaded == f"{mode} {int(is_lazy)}"
    words = f"habana_frameworks was loaded before PT_HPU_LAZY_MODE was set; export PT_HPU_LAZY_MODE={int(not is_lazy)} "
    assert asked[is_lazy] == mode
    assert asked[not is_lazy].startswith(words)
