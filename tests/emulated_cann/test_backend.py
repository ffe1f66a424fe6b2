"""The Ascend backend over the emulated CANN."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.attention_layers import layer


def run_python(script: str) -> str:
    """Return what a script prints in a process of its own, which ends without torch_npu's own end."""
    command = [sys.executable, "-u", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def test_npu_v06_the_backend_finds_that_blocks_are_added_up(npu: Any) -> None:
    import torch_npu

    from vllm_gaudi_spec.devices.ascend.attention import adds_up_blocks, compressed_mask

    device = torch.device("npu")
    assert all(adds_up_blocks(torch_npu, device, layer(), num_queries) for num_queries in (1, 2))
    assert adds_up_blocks(torch_npu, device, layer(), 2, compressed_mask(device))


def test_the_backend_finds_which_heads_have_compressed_masks(npu: Any) -> None:
    import torch_npu

    from vllm_gaudi_spec.devices.ascend.attention import compressed_mask, compresses_masks

    mask = compressed_mask(torch.device("npu"))
    assert compresses_masks(torch_npu, torch.device("npu"), layer(), mask)
    assert not compresses_masks(torch_npu, torch.device("npu"), layer(), mask[:100])
    assert torch_npu.npu.get_soc_version() == 223


AFTER_A_FAILURE = """
import os, time, torch
from vllm_gaudi_spec.devices.ascend.emulated import make_backend
memory = make_backend().memory
rows, ones = torch.zeros(4, 2, device="npu"), torch.ones(4, device="npu")
assert memory.download(ones).tolist() == [1.0] * 4
rows.index_select(0, torch.tensor([9], device="npu"))
{failure}
for attempt in range(3):
    began = time.monotonic()
    try:
        wait = memory.start_download(ones * 9)
        print("read", wait().tolist())
    except RuntimeError as error:
        print("raised", time.monotonic() - began < 20)
os._exit(0)
"""

FAILURES = {
    "seen first by the download": "",
    # The card has failed, and torch_npu's queue learns of it by a launch before the copy, after the copy was queued.
    "seen first by a launch": """
stream = torch.npu.current_stream()
try:
    while True: stream.query(); time.sleep(0.001)
except RuntimeError: pass
ones.add_(1)
""",
    # The engine waits for the step before the one that raised.
    "raised elsewhere": """
stream = torch.npu.current_stream()
try:
    while True: stream.query(); time.sleep(0.001)
except RuntimeError: pass
try:
    while True: ones.add_(1); time.sleep(0.001)
except RuntimeError: pass
""",
}

SLOW = pytest.param("seen first by a launch", marks=pytest.mark.slow)


@pytest.mark.parametrize("failure", ["seen first by the download", SLOW, "raised elsewhere"])
def test_a_download_after_an_operator_that_failed_raises(failure: str) -> None:
    """torch_npu by itself returns from the wait with whatever the memory held, or never."""
    out = run_python(AFTER_A_FAILURE.format(failure=FAILURES[failure]))
    assert [line for line in out.splitlines() if line.startswith(("raised", "read"))] == ["raised True"] * 3, out


AT_EXIT = """
import atexit, torch, weakref
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

class Engine: ...

engine = Engine()  # vLLM's, in the caller's process: Python ends it after what is imported from here on
weakref.finalize(engine, lambda: (parallel_state.destroy_model_parallel(), print("vLLM")))

from vllm_gaudi_spec import worker
from vllm_gaudi_spec.device_table import load_backend

load_backend()
torch.npu.set_device(0)
with set_current_vllm_config(VllmConfig()):
    parallel_state.init_distributed_environment(1, 0, "file://FILE", 0, "hccl")
    parallel_state.initialize_model_parallel(1)

class Worker:
    model_runner = "not ended yet"

    def shutdown(self):
        print("worker")

own = Worker()
atexit.register(worker._shut_down_at_exit, weakref.ref(own))
"""


@pytest.mark.slow  # half a minute, of which vLLM's imports are most
def test_groups_are_left_before_torch_npu_takes_them_away(tmp_path: Path) -> None:
    script = AT_EXIT.replace("FILE", str(tmp_path / "ranks"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split()[-2:] == ["worker", "vLLM"]
    assert "Error" not in done.stderr
