"""Small schedulers and drafter configurations, and the output of a scripted worker."""

from pathlib import Path
from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from tests.unit.test_config import engine_config
from vllm_gaudi_spec.outputs import SpeculativeOutput

NUM_DRAFTS = 3
PROMPT = [5, 6, 7, 8]


def drafter(**options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=3, **options)


_SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
_GROUPS = [KVCacheGroupSpec(["layer"], _SPEC)]


def scheduler_of(
    kind: type[Scheduler], folder: Path, groups: list[KVCacheGroupSpec] = _GROUPS, **options: Any
) -> Scheduler:
    speculative = dict(method="ngram", num_speculative_tokens=NUM_DRAFTS) | options.pop("speculative", {})
    made = engine_config(folder, speculative, per_request_spec_decode_metrics="detailed", **options)
    made.cache_config.num_gpu_blocks = 32
    kv_cache = KVCacheConfig(32, [], groups)
    return kind(made, kv_cache, StructuredOutputManager(made), block_size=16, log_stats=True)


def answer(new_tokens: dict[str, list[int]], num_real: dict[str, int] | None) -> ModelRunnerOutput:
    index = {req_id: row for row, req_id in enumerate(new_tokens)}
    tokens = [*new_tokens.values()]
    if num_real is None:
        return ModelRunnerOutput([*new_tokens], index, sampled_token_ids=tokens)
    return SpeculativeOutput([*new_tokens], index, sampled_token_ids=tokens, num_real_drafts=num_real)


class Chooses:
    """Step times that choose a given number of drafts, and record the rows of observed steps."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.observed: list[int] = []

    def choose(self, *args: object, **kwargs: object) -> int:
        return self.num_drafts

    def fit(self, num_rows: int) -> int:
        return num_rows

    def observe(self, num_rows: int, *args: object, **kwargs: object) -> None:
        self.observed.append(num_rows)
