"""Raises an error on import if vLLM cannot run with this plugin.

vLLM ignores exceptions that a plugin raises and would then use one of its own platforms. However, exceptions raised
during the import of the selected platform module stop vLLM.
"""

from vllm_gaudi_spec.config import UnusableInstallationError
from vllm_gaudi_spec.versions import explain_unusable_vllm

if (reason := explain_unusable_vllm()) is not None:
    raise UnusableInstallationError(f"{reason}.")
