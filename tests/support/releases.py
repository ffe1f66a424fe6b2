"""Names of vLLM that tests use and that differ between its supported releases."""

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_gaudi_spec.upstream.release import FROM_0_33

if FROM_0_33:
    from vllm.entrypoints.common.cli_args import make_arg_parser
else:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

__all__ = ["hash_options", "make_arg_parser", "only_0_32"]

only_0_32 = pytest.mark.skipif(FROM_0_33, reason="for vLLM 0.32 only")


def hash_options(scheduler: Scheduler) -> tuple[int, ...]:
    """Return further arguments of `get_request_block_hasher`: how many tokens after its block a hash covers.

    With a head, vLLM 0.33 shares blocks up to the last one, because their hashes cover what the head read.
    """
    return (scheduler.num_hash_lookahead_tokens,) if FROM_0_33 else ()
