"""The method `universal_draft` for vllm-ascend, using vllm-ascend's platform, worker, and vLLM version.

The code in this folder does not require the vLLM version that our own platform requires. The integration and our
platform share `drafting/universal/`, `config.py`, and `environment/`. `versions.py` lists the supported releases,
`patches.py` contains the patches to them, and `proposer.py` implements the drafter.
"""

from __future__ import annotations

import logging


def is_active() -> bool:
    """Whether vllm-ascend is the active platform in this process."""
    from vllm.platforms import current_platform

    return type(current_platform).__module__.split(".")[0] == "vllm_ascend"


def register() -> None:
    """Add the method to vllm-ascend and its vLLM, or reject the method if their releases are not supported.

    This function may be called repeatedly, as vLLM does in each of its processes.
    """
    from vllm_gaudi_spec.integrations.vllm_ascend import patches, versions

    logger = logging.getLogger("vllm")
    if (reason := versions.explain_unsupported()) is not None:
        patches.refuse_universal_draft(reason)
        logger.info("vllm_gaudi_spec does not add universal_draft to vllm-ascend: %s", reason)
    else:
        patches.apply()
        logger.info("vllm_gaudi_spec adds method universal_draft to vllm-ascend %s.", versions.VLLM_ASCEND)
