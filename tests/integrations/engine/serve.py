"""Texts of vllm-ascend's own engine, in this process: python serve.py '{"model": ..., "speculation": {...}, "prompts":
[...], "length": 24}'. The last line is JSON."""

import json
import sys
from typing import Any

import transformers  # noqa: F401  before torchvision is replaced, which it looks for
from vllm.plugins import load_general_plugins


def prepare() -> None:
    load_general_plugins()
    import compiled
    import without_images

    without_images.replace_torchvision()
    import vllm_ascend.worker.worker  # noqa: F401  all others, in the order in which they can be
    from vllm_ascend.worker import block_table

    block_table._compute_slot_mapping_kernel = compiled.SlotMapping()


def serve(asked: dict[str, Any]) -> dict[str, Any]:
    import torch_npu
    from sitecustomize import CARD
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    engine = LLM(
        asked["model"],
        dtype="float16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        block_size=128,
        gpu_memory_utilization=0.02,
        num_gpu_blocks_override=16,
        speculative_config=asked["speculation"],
        disable_log_stats=False,
    )
    greedy = SamplingParams(temperature=0, max_tokens=asked["length"], ignore_eos=True)
    # Twice: the second time, beginnings of prompts are in the cache.
    runs = [[list(it.outputs[0].token_ids) for it in engine.generate(asked["prompts"], greedy)] for _ in range(2)]
    texts = [it.outputs[0].text for it in engine.generate(asked["prompts"], greedy)]
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    return {
        "runs": runs,
        "texts": texts,
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "platform": type(current_platform).__module__,
        "torch_npu": torch_npu.__version__,
        "launches": CARD.counts().launches,
    }


if __name__ == "__main__":
    prepare()
    print(json.dumps(serve(json.loads(sys.argv[1]))))
