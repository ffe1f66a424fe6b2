"""Detection of the installed vLLM release.

Only modules in this folder use these flags. A flag can be removed when support for the older release ends. Importing
this module does not import vLLM.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from vllm_gaudi_spec.versions import installed_vllm


def _is_from(minor: str, file: str) -> bool:
    """Whether the vLLM release is `minor` or newer. If vLLM has no version, as in a source folder, this is true if vLLM
    contains `file`."""
    if found := re.match(r"(\d+)\.(\d+)", installed_vllm() or ""):
        return tuple(map(int, found.groups())) >= tuple(map(int, minor.split(".")))
    spec = find_spec("vllm")
    return any((Path(folder) / file).exists() for folder in (spec and spec.submodule_search_locations) or ())


FROM_0_33 = _is_from("0.33", "v1/core/kv_cache_planning.py")


def uses_older_ray_executor() -> bool:
    """Whether vLLM's older Ray executor, which vLLM 0.33 no longer has, is selected."""
    from vllm import envs

    return not FROM_0_33 and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND
