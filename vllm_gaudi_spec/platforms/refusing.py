"""Raises an error on import if vLLM cannot run.

vLLM ignores exceptions raised by a plugin and would run on one of its own platforms. It does not ignore an exception
raised while it imports the platform module that a plugin selected.
"""

from vllm_gaudi_spec.config import UnusableInstallationError
from vllm_gaudi_spec.versions import explain_unusable_vllm

if (reason := explain_unusable_vllm()) is not None:
    raise UnusableInstallationError(f"{reason}.")
