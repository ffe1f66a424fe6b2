"""One workload on the emulated Gaudi by whichever worker this Python's vLLM has, its counts and tokens as JSON.

python workload.py CHECKPOINT OUT [--ngram]

Runs in our environment and in the vendor's, in one process, so that the card and its counters are at hand. Nothing of
the workers is changed; what stands around the vendor's: its KV cache is marked for the counters, and the n-gram
proposer of its vLLM gets room for the vendor's warm-up, which writes past its buffers. And downloads into memory that
is not pinned do not arrive late there: the worker waits for an event alone (hpu_model_runner.py,
AsyncHPUModelRunnerOutput), and with a hostile card's downloads every token of it is what lay in that memory.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

OUTPUT_LEN = 32
BATCHES = (1, 2, 3, 4, 4)
MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCKS, BLOCK_SIZE = 4, 512, 64, 128
NUM_DRAFTS = 3


def prompts(vocab_size: int) -> list[list[list[int]]]:
    """In batches; half of a prompt repeats, for n-grams."""
    draw = random.Random(0)
    found = []
    for size in BATCHES:
        batch = []
        for _ in range(size):
            part = [draw.randrange(vocab_size) for _ in range(draw.randrange(8, 100))]
            batch.append(part + part)
        found.append(batch)
    return found


def stand_around_the_vendors(card: Any, kv: Any) -> None:
    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    card.model = dataclasses.replace(card.model, downloads_late=False)
    initialize, make = HPUModelRunner.initialize_kv_cache, NgramProposer.__init__

    def initialize_and_mark(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        for cache in self.kv_caches:
            for tensor in cache:
                if tensor is not None:
                    kv(tensor)

    def make_larger(self: Any, vllm_config: Any) -> None:
        make(self, vllm_config)
        rows = 16 * vllm_config.scheduler_config.max_num_seqs
        self.valid_ngram_draft = np.zeros((rows, self.k), dtype=np.int32)
        self.valid_ngram_num_drafts = np.zeros(rows, dtype=np.int32)

    HPUModelRunner.initialize_kv_cache = initialize_and_mark
    NgramProposer.__init__ = make_larger


def serve(checkpoint: str, ngram: bool, vendors: bool) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    import card_emulator

    if vendors:
        stand_around_the_vendors(card_emulator.device(), card_emulator.tag_kv)
    drafting = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    drafting |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=BLOCKS,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        speculative_config=drafting if ngram else None,
    )
    card = card_emulator.device()
    card.mark_step()
    warm_up = card.counters.total
    card.seal()
    engine, steps = llm.llm_engine, 0
    finished: dict[str, list[int]] = {}
    asked: dict[str, list[int]] = {}
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
    vocab_size = llm.model_config.get_vocab_size()
    for number, batch in enumerate(prompts(vocab_size)):
        for index, tokens in enumerate(batch):
            name = f"{number}.{index}"
            asked[name] = tokens
            engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        while engine.has_unfinished_requests():
            steps += 1
            for output in engine.step():
                if output.finished:
                    finished[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
    card.mark_step()
    total = card.counters.total
    run = {name: value - getattr(warm_up, name, 0) for name, value in total.as_dict().items()}
    return {
        "steps": steps,
        "warm_up": warm_up.as_dict(),
        "run": run,
        "requests": [{"prompt": asked[name], "output": finished[name]} for name in sorted(asked)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ngram", action="store_true")
    options = parser.parse_args()
    vendors = importlib.util.find_spec("importable_torchvision") is not None
    options.out.write_text(json.dumps(serve(options.checkpoint, options.ngram, vendors)))


if __name__ == "__main__":
    main()
