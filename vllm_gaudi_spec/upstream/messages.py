"""Patches for messages to users: log lines, and errors that end a process."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from vllm_gaudi_spec.config import UnusableInstallationError, in_one_line
from vllm_gaudi_spec.environment import set_start_failure_file, start_failure_file
from vllm_gaudi_spec.upstream.patching import patches, wrap


def share_vllm_logging() -> None:
    """Log through vLLM's handlers, at vLLM's log level.

    Reason: vLLM's handlers apply only to loggers whose names begin with `vllm`.
    Remove when: upstream also configures the loggers of its plugins.
    """
    ours, theirs = logging.getLogger("vllm_gaudi_spec"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.level)


def quiet_our_scheduler() -> None:
    """Suppress vLLM's warning about custom scheduler classes for the schedulers of this plugin.

    Reason: for every scheduler class outside vLLM, vLLM warns that async scheduling may be off, but our schedulers
    support it. The warning still appears for a class that the user specifies.
    Remove when: upstream accepts the scheduler class of a platform without a warning.
    """
    logging.getLogger("vllm.config.scheduler").addFilter(_is_not_of_our_scheduler)


def _is_not_of_our_scheduler(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Using custom scheduler class vllm_gaudi_spec.")


_TWO_PLATFORMS = "Only one platform plugin can be activated"


@patches("sys:excepthook")
def end_errors_with_their_message(
    original: Callable[..., None], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the message of an uncaught error in one line after the traceback.

    If vLLM cannot run with this installation, print only the line. If two platform plugins are active, add a remedy.
    Reason: pydantic ends its error messages with a link, and vLLM's message about two plugins does not suggest a
    remedy.
    Remove when: upstream's command line reports mistakes of the user without a traceback.
    """
    if not issubclass(kind, UnusableInstallationError):
        original(kind, error, trace)
    if not issubclass(kind, KeyboardInterrupt):
        message = in_one_line(error)
        if _TWO_PLATFORMS in message:
            message += " Set VLLM_PLUGINS=gaudi_spec to use this platform alone, or unset VGS_DEVICE to use the other."
        print(f"vllm: error: {message}", file=sys.stderr)


_FAILED = "failed to start."
_failure_file: Any = None
"""The file in which an engine that fails to start stores its error. It is deleted when the next engine starts or this
process ends."""


def name_the_cause_of_a_failed_start() -> None:
    """If an engine fails to start, make the front end raise the error of the engine or its worker.

    Reason: that error appears only in another process's log, and the front end's own error is "See root cause above".
    Remove when: the error from `wait_for_engine_startup` contains the engine's error.
    """
    from vllm.v1.engine import utils

    wrap(utils.CoreEngineProcManager, "__init__", _start_with_a_failure_file)
    wrap(utils, "wait_for_engine_startup", _raise_the_cause)
    for name in ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"):
        logging.getLogger(name).addFilter(_note_failure)


def _start_with_a_failure_file(original: Callable[..., None], manager: Any, *args: Any, **named: Any) -> None:
    global _failure_file
    _failure_file = tempfile.NamedTemporaryFile(prefix="vllm_gaudi_spec-")  # noqa: SIM115
    set_start_failure_file(_failure_file.name)
    original(manager, *args, **named)


def _note_failure(record: logging.LogRecord) -> bool:
    path = start_failure_file()
    if record.exc_info and record.exc_info[1] and _FAILED in record.getMessage() and path:
        # If there is no space for the file, the log still contains the error.
        with suppress(OSError):
            # Keep the first error, because after a worker's error, the engine reports only that a worker failed.
            if not path.stat().st_size:
                path.write_text(in_one_line(record.exc_info[1]), encoding="utf-8")
    return True


def _raise_the_cause(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return original(*args, **named)
    except RuntimeError as error:
        if _failure_file is None or not (cause := _failure_file.read().decode("utf-8")):
            raise
        raise RuntimeError(cause) from error
