"""Speculative decoding for vLLM on Intel Gaudi, with the two entry points that vLLM calls.

vLLM imports this package during its own import, so this module must be cheap to import and must import neither vLLM nor
torch.
"""

__version__ = "0.1.0"


def platform_plugin() -> str | None:
    """Return the platform class, or None to let vLLM choose another platform. Entry point `vllm.platform_plugins`."""
    from vllm_gaudi_spec import upstream, versions
    from vllm_gaudi_spec.device_table import (
        REFUSING_PLATFORM,
        choose_device,
        is_requested,
        log_wrong_vllm,
        other_platform_plugins,
        platform_class,
    )

    device = choose_device()
    if device is None:
        return None
    if (reason := versions.explain_wrong_vllm()) is not None:
        if not is_requested():
            log_wrong_vllm(reason)
            return None
        upstream.end_errors_with_their_message()
        return REFUSING_PLATFORM
    upstream.admit_domain_libraries_of_other_builds()
    if other_platform_plugins():
        upstream.end_errors_with_their_message()  # vLLM may reject the combination of platform plugins
    upstream.answer_for_vllm_distribution()
    return platform_class(device)


def general_plugin() -> None:
    """Apply patches in each vLLM process after vLLM has been imported. Entry point `vllm.general_plugins`."""
    from vllm_gaudi_spec.integrations import vllm_ascend

    if vllm_ascend.is_active():  # vllm-ascend needs a vLLM version that the code below does not support
        vllm_ascend.register()
        return
    from vllm_gaudi_spec import versions

    if versions.explain_wrong_vllm() is not None:
        return  # the platform has already logged the reason, and its modules may fail to load with this vLLM release
    from vllm_gaudi_spec.platforms import base

    if base.is_active():
        base.apply_patches()
