"""Imported in place of a platform beside another release of vLLM, where ours was asked for by name.

vLLM swallows what a plugin raises and would run on a platform of its own. What this module raises it does not swallow,
in any release: the platform's module is imported where the platform is needed.
"""

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.versions import wrong_vllm

if (reason := wrong_vllm()) is not None:
    raise UnsupportedConfigError(f"{reason}.")
