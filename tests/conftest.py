"""What every test needs: the environment vLLM is imported in, fixed seeds."""

import os
import random

import pytest

# Before anything imports vLLM. In-process engines: nothing to wait for, tracebacks end in the test, and collective_rpc
# reaches the worker directly. Tests of the server start it with its own, default environment.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when torch is loaded. Threads that spin at each barrier of a tiny model make it ten times slower as soon as the
# machine has anything else to do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read when Ray is imported, which vLLM does where it is installed: nodes have the address 127.0.0.1, and listen there.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


# Tests of single kernels, which Triton's interpreter runs on a CPU.
_KERNEL_TESTS = tuple(f"test_cuda_{name}.py" for name in ("decoder", "few_queries", "kernels", "row_kernels", "rules"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU is left out where there is none, kernels aside where Triton plays one."""
    import torch

    if torch.cuda.is_available():
        return
    played = _KERNEL_TESTS if os.environ.get("TRITON_INTERPRET") == "1" else ()
    without = [item for item in items if item.get_closest_marker("cuda") is not None and item.path.name not in played]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if item not in without]
