"""What the user reads of an error, and our log lines among vLLM's."""

import inspect
import logging

import pytest
from vllm.config import scheduler
from vllm.v1.engine import core, utils
from vllm.v1.executor import multiproc_executor

from tests.support.processes import run_code
from vllm_gaudi_spec import environment, upstream
from vllm_gaudi_spec.upstream import messages

FAILURES = {
    "import pydantic; M = pydantic.create_model('M', x=(int, ...)); M(x='a')": "x: Input should be a valid integer",
    "raise RuntimeError('two\\nlines')": "two lines",
    "raise RuntimeError('Only one platform plugin can be activated, but got: [1, 2]')": "or unset VGS_DEVICE",
}


def test_errors_end_with_their_message() -> None:
    """An error that ends the process shows its message as the last line."""
    code = f"""
import sys
from vllm_gaudi_spec import upstream
upstream.end_errors_with_their_message()
for failure in {[*FAILURES]}:
    try:
        exec(failure)
    except Exception:
        sys.excepthook(*sys.exc_info())
    print("\\n--", file=sys.stderr)
"""
    result = run_code(code, check=True)
    *shown, _ = result.stderr.split("\n--\n")
    for text, expected in zip(shown, FAILURES.values(), strict=True):
        last = text.strip().splitlines()[-1]
        assert last.startswith("vllm: error: ")
        assert expected in last


def test_an_unusable_installation_is_one_line() -> None:
    code = (
        "from vllm_gaudi_spec import upstream, config; upstream.end_errors_with_their_message()\n"
        "raise config.UnusableInstallationError('torchvision is wrong; pip uninstall torchvision.')"
    )
    result = run_code(code)
    assert result.returncode == 1
    assert result.stderr == "vllm: error: torchvision is wrong; pip uninstall torchvision.\n"


def test_our_log_lines_reach_vllms_handlers() -> None:
    upstream.share_vllm_logging()
    assert logging.getLogger("vllm_gaudi_spec").handlers == logging.getLogger("vllm").handlers


def test_vllm_warns_of_schedulers_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream words it otherwise, or no longer warns: then `quiet_our_scheduler` can go."""
    assert '"Using custom scheduler class %s.' in inspect.getsource(scheduler)
    upstream.apply()
    # Where records go from this logger, and how often, depends on whether this process has configured an engine before.
    noted: list[logging.LogRecord] = []
    monkeypatch.setattr(scheduler.logger, "callHandlers", noted.append)
    for name in ("vllm_gaudi_spec.scheduling.scheduler.SpecScheduler", "my.Scheduler"):
        scheduler.logger.warning("Using custom scheduler class %s. Beware.", name)
    assert [record.args for record in noted] == [("my.Scheduler",)]


def test_a_failed_start_raises_the_first_error_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that logged none leaves the front end's own."""
    upstream.name_the_cause_of_a_failed_start()
    monkeypatch.setattr(messages, "_failure_file", None)
    monkeypatch.setenv(environment._START_FAILURE, "")

    def engine(words: list[str]) -> None:
        for word in words:
            try:
                raise ValueError(word)
            except ValueError:
                core.logger.exception("EngineCore failed to start.")

    def wait() -> None:
        raise RuntimeError("See root cause above.")

    for words, expected in (
        (["the worker's\nreason", "the engine's"], "the worker's reason"),
        ([], "See root cause above."),
    ):
        messages._start_with_a_failure_file(lambda _, words=words: engine(words), None)
        with pytest.raises(RuntimeError) as raised:
            messages._raise_the_cause(wait)
        assert str(raised.value) == expected


def test_upstreams_front_end_still_does_not_name_the_cause() -> None:
    """Fails when it does, or when an engine logs its failure otherwise; then review the patch."""
    assert "See root cause above" in inspect.getsource(inspect.unwrap(utils.wait_for_engine_startup))
    for module in (core, multiproc_executor):
        assert 'failed to start.")' in inspect.getsource(module)
        assert module.logger.name == module.__name__
