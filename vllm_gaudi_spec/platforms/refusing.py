"""Stands in for a platform where vLLM cannot run: its import raises.

vLLM ignores exceptions of a plugin and would run on a platform of its own. No release ignores an exception of this
module: the platform's module is imported where the platform is needed.
"""

from vllm_gaudi_spec.config import UnusableInstallationError
from vllm_gaudi_spec.versions import vllm_mistake

if (reason := vllm_mistake()) is not None:
    raise UnusableInstallationError(f"{reason}.")
