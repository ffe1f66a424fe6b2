"""Which form experts are computed in, by numbers alone: also for those who estimate without a model."""

from __future__ import annotations

# What a gathered weight costs, beside one that is used where it lies: it is read, written and read again.
COST_OF_GATHERING = 3
GATHERED_BYTES_AT_ONCE = 256 << 20
# Tokens from which on a Gaudi's operator is used. Below, reading weights takes longer than computing with all of them:
# a Gaudi 2 does 432 TFLOPS in bfloat16, and reads 2.45 TB/s. And at batch 1 the operator was no faster (vllm-gaudi,
# issue 1733).
GAUDI_OPERATOR_FROM = 128


def num_gathered(num_tokens: int, top_k: int, num_experts: int) -> int:
    """How many experts' weights are copied together; 0 where none are."""
    reached = num_tokens * top_k
    return reached if reached * COST_OF_GATHERING < num_experts else 0
