"""vLLM's classes and settings for DFlash, DFlash2, and DSpark drafters.

This module breaks if a class or function is renamed. `drafting/block.py` also breaks if the parts of an attention layer
that project keys and values are renamed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm import envs
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def allow_mixed_windows() -> Iterator[None]:
    """Allow drafters that mix layers with and without a sliding window.

    Reason: upstream supports such drafters only in its V2 model runner, because the V1 model runner allows only one KV
    cache group per drafter. Our runner supports several groups.
    Remove when: `_resolve_layer_attention` asks the platform whether it supports several groups.
    """
    before = envs.__dict__.get(_V2_RUNNER)
    setattr(envs, _V2_RUNNER, True)
    try:
        yield
    finally:
        if before is None:
            delattr(envs, _V2_RUNNER)
        else:
            setattr(envs, _V2_RUNNER, before)
