"""vLLM's classes and settings of DFlash, DFlash2 and DSpark drafters.

Breaks when a class or a function is renamed, or when the classes name the parts of an attention layer differently
(`drafting/block.py` projects keys and values with them).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm import envs
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def allow_mixed_windows() -> Iterator[None]:
    """Let drafters that mix layers with and without a sliding window be built.

    Reason: upstream builds them for its second runner only, since its first has one KV cache group for a drafter. Ours
    has as many as the layers need.
    Remove when: `_resolve_layer_attention` asks a platform whether it has several groups.
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
