"""Method `universal_draft` for users of vllm-ascend, who keep its platform, its worker and its version of vLLM.

Nothing here or below needs the vLLM of our own platform; shared with it are drafting/universal/, config.py and
environment.py.
versions.py has the supported releases, patches.py the changes to them, proposer.py is the drafter.
"""

from __future__ import annotations

import logging


def is_active() -> bool:
    """Whether vllm-ascend is the platform of this process."""
    from vllm.platforms import current_platform

    return type(current_platform).__module__.split(".")[0] == "vllm_ascend"


def register() -> None:
    """Add the method to vllm-ascend and its vLLM, or a refusal of it beside unsupported releases. Safe to call again:
    vLLM does in each of its processes."""
    from vllm_gaudi_spec.integrations.vllm_ascend import patches, versions

    logger = logging.getLogger("vllm")
    if (reason := versions.why_unsupported()) is not None:
        patches.refuse_universal_draft(reason)
        logger.info("vllm_gaudi_spec adds nothing to vllm-ascend: %s", reason)
    else:
        patches.apply()
        logger.info("vllm_gaudi_spec adds method universal_draft to vllm-ascend %s.", versions.VLLM_ASCEND)
