"""Speculative decoding for vLLM on Intel Gaudi: the two entry points that vLLM calls.

The import of this package must stay cheap and must not import vLLM or torch: vLLM calls these functions in the middle
of its own import.
"""

__version__ = "0.32.0.post1"
"""The release of vLLM that this is made for, and which release of this package it is for that one."""


def platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform class to use, or None to leave the choice to vLLM."""
    from vllm_gaudi_spec import upstream, versions
    from vllm_gaudi_spec.devices import (
        REFUSING_PLATFORM,
        asked_for,
        choose_device,
        log_wrong_vllm,
        other_platform_plugins,
        platform_class,
    )

    device = choose_device()
    if device is None:
        return None
    if (reason := versions.wrong_vllm()) is not None:
        if not asked_for():
            log_wrong_vllm(reason)
            return None
        upstream.end_errors_with_their_message()
        return REFUSING_PLATFORM
    upstream.admit_domain_libraries_of_other_builds()
    if other_platform_plugins():
        upstream.end_errors_with_their_message()  # vLLM may refuse to choose, without advice
    upstream.answer_for_vllm_distribution()
    return platform_class(device)


def general_plugin() -> None:
    """Entry point `vllm.general_plugins`: runs in every vLLM process, after vLLM is imported."""
    from vllm_gaudi_spec.integrations import vllm_ascend

    if vllm_ascend.is_active():  # it has another vLLM, for which the rest is not made
        vllm_ascend.register()
        return
    from vllm_gaudi_spec import versions

    if versions.wrong_vllm() is not None:
        return  # the platform has logged that, and its modules may not even load there
    from vllm_gaudi_spec.platforms import base

    if base.is_active():
        base.apply_patches()
