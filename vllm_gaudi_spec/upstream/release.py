"""Which of the supported releases of vLLM is installed.

Only this folder may ask. Each switch ends with the support of the older release. Imports nothing of vLLM.
"""

import re

from vllm_gaudi_spec.versions import installed_vllm


def _is_from(minor: str) -> bool:
    """Whether vLLM is `minor` or newer. A source folder that names no release is taken for a newer one."""
    found = re.match(r"(\d+)\.(\d+)", installed_vllm() or "")
    return found is None or tuple(map(int, found.groups())) >= tuple(map(int, minor.split(".")))


FROM_0_33 = _is_from("0.33")


def uses_older_ray_executor() -> bool:
    """Whether vLLM's older executor for Ray is chosen, which 0.33 no longer has."""
    from vllm import envs

    return not FROM_0_33 and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND
