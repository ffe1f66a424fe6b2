"""What the user reads of an error, and our log lines among vLLM's."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys

import pytest

from vllm_gaudi_spec import compat


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


def test_an_unusable_installation_is_one_line() -> None:
    code = (
        "from vllm_gaudi_spec import compat, config; compat.end_errors_with_their_message()\n"
        "raise config.UnusableInstallationError('torchvision is wrong; pip uninstall torchvision.')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "vllm: error: torchvision is wrong; pip uninstall torchvision.\n"


def test_our_log_lines_reach_vllms_handlers() -> None:
    compat.share_vllm_logging()
    assert logging.getLogger("vllm_gaudi_spec").handlers == logging.getLogger("vllm").handlers


def test_vllm_warns_of_schedulers_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream words it otherwise, or no longer warns: then `quiet_our_scheduler` can go."""
    from vllm.config import scheduler

    assert '"Using custom scheduler class %s.' in inspect.getsource(scheduler)
    compat.apply()
    # Where records go from this logger, and how often, depends on whether this process has configured an engine before.
    noted: list[logging.LogRecord] = []
    monkeypatch.setattr(scheduler.logger, "callHandlers", noted.append)
    for name in ("vllm_gaudi_spec.scheduling.scheduler.SpecScheduler", "my.Scheduler"):
        scheduler.logger.warning("Using custom scheduler class %s. Beware.", name)
    assert [record.args for record in noted] == [("my.Scheduler",)]
