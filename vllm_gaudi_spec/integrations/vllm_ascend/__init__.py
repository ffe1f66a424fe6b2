"""Method `universal_draft` in vllm-ascend, with vllm-ascend's platform, worker, and vLLM version.

Nothing in this folder needs the vLLM version of our own platform. The integration and the platform share
`drafting/universal/`, `config.py`, and `environment/`. `versions.py` lists the supported releases, `patches.py`
contains the patches to them, and `proposer.py` implements the drafter.
"""

from __future__ import annotations

import logging


def is_active() -> bool:
    """Whether vllm-ascend is the platform of this process."""
    from vllm.platforms import current_platform

    return type(current_platform).__module__.split(".")[0] == "vllm_ascend"


def register() -> None:
    """Add the method to vllm-ascend and its vLLM, or refuse it if their releases are not supported.

    This function can be called repeatedly, as vLLM does in each of its processes.
    """
    from vllm_gaudi_spec.integrations.vllm_ascend import patches, versions

    logger = logging.getLogger("vllm")
    if (reason := versions.explain_unsupported()) is not None:
        patches.refuse_universal_draft(reason)
        logger.info("vllm_gaudi_spec does not add universal_draft to vllm-ascend: %s", reason)
    else:
        patches.apply()
        logger.info("vllm_gaudi_spec adds method universal_draft to vllm-ascend %s.", versions.VLLM_ASCEND)
