"""Names of vLLM that tests use and that differ between its supported releases."""

import pytest

from vllm_gaudi_spec.upstream.release import FROM_0_33

if FROM_0_33:
    from vllm.entrypoints.common.cli_args import make_arg_parser
else:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

__all__ = ["make_arg_parser", "only_0_32"]

only_0_32 = pytest.mark.skipif(FROM_0_33, reason="vLLM 0.33 no longer has it")
