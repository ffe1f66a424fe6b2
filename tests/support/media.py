"""Configuration of a multimodal model and batches with images, to test the runner's bookkeeping."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_gaudi_spec.records import Batch, Planned, Shape
from vllm_gaudi_spec.runner.requests import Requests

CONFIG: Any = SimpleNamespace(
    model="tiny",
    dtype=torch.float32,
    uses_mrope=True,
    mrope_num_dims=3,
    is_mm_prefix_lm=False,
    hf_config=SimpleNamespace(model_type="qwen2_vl"),
    get_sliding_window=lambda: None,
)


def batch(
    requests: Requests,
    phase: str,
    queries: int,
    counts: dict[str, int],
    computed: int,
    num_rows: int | None = None,
    name: str = "image",
) -> Batch:
    """Return a batch with `counts` tokens of each request.

    The request that is named has `computed` tokens before them. Without `num_rows` no row is padding.
    """
    members = [requests.by_id[name] for name in counts]
    requests.by_id[name].num_computed = computed
    shape = Shape(phase, num_rows or len(members), queries, 16)
    planned = Planned(
        shape=shape,
        requests=members,
        starts=[member.num_computed for member in members],
        counts=list(counts.values()),
        ends=[member.num_computed + count for member, count in zip(members, counts.values(), strict=True)],
        finishes=[True] * len(members),
    )
    return requests.make_batch(planned)
