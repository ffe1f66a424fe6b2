"""Raises on import where vLLM cannot run.

vLLM ignores exceptions of a plugin and would run on one of its own platforms. It does not ignore an exception while it
imports the module of the platform that a plugin chose.
"""

from vllm_gaudi_spec.config import UnusableInstallationError
from vllm_gaudi_spec.versions import explain_unusable_vllm

if (reason := explain_unusable_vllm()) is not None:
    raise UnusableInstallationError(f"{reason}.")
