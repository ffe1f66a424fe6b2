"""What the host pays for one decode step with drafts: prepare, and the bookkeeping behind the verdict.

python benchmarks/host_step.py --json .bench/host_step.json

The real runner with a model that costs nothing and a drafter that is not asked, so what remains is what runs beside
every forward. Every row brings k drafts to every step.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the runner must be at hand

import common
import torch
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_gaudi_spec.demo_model import demo_model_path

BATCHES = (1, 8, 64, 256)
NUM_DRAFTS = 4
CONTEXT = 512
HIDDEN = 8
VOCAB = 64
LIMIT_US = 1500.0


class FreeModel:
    """Stands in for the target: shapes are right, values are not looked at."""

    def __init__(self) -> None:
        self._hidden = torch.zeros(max(BATCHES) * (1 + NUM_DRAFTS), HIDDEN)
        self._logits = torch.zeros(max(BATCHES) * (1 + NUM_DRAFTS), VOCAB)

    def forward(self, inputs: Any) -> torch.Tensor:
        return self._hidden[: inputs.token_ids_T.shape[0]]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: hidden.shape[0]]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def open_runner() -> tuple[LLM, Any]:
    llm = LLM(
        demo_model_path(),
        dtype="float32",
        max_model_len=2 * CONTEXT,
        max_num_seqs=max(BATCHES),
        kv_cache_memory_bytes=64 << 20,
        speculative_config={"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3},
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.runner
    runner.target = FreeModel()
    runner.landing = type(runner.landing)(
        runner.max_rows + 1, 1 + NUM_DRAFTS, HIDDEN, torch.float32, runner.backend.torch_device
    )
    runner.drafting.propose_behind = lambda step, most: None
    return llm, runner


def admit(runner: Any, names: list[str]) -> None:
    """Requests with one token of their context left to compute."""
    new = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=list(range(CONTEXT)),
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=CONTEXT),
            pooling_params=None,
            block_ids=(list(range(1, 2 * CONTEXT // 32 + 1)),),
            num_computed_tokens=CONTEXT - 1,
            lora_request=None,
        )
        for name in names
    ]
    step(runner, dict.fromkeys(names, 1), CachedRequestData.make_empty(), new, {})


def step(runner: Any, tokens: dict[str, int], cached: Any, new: list[Any], drafts: dict[str, list[int]]) -> None:
    scheduled = SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens=drafts,
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        num_spec_tokens_to_schedule=NUM_DRAFTS,
    )
    with torch.inference_mode():
        runner.execute_model(scheduled)
        runner.sample_tokens(None)


def measure(runner: Any, batch: int, steps: int) -> float:
    """Median microseconds of a step. Lengths are put back each time, so all steps are alike."""
    names = [f"{batch}-{i}" for i in range(batch)]
    admit(runner, names)
    rows = torch.tensor([runner.requests.by_id[name].row for name in names])
    cached = CachedRequestData(names, set(), [], {}, [None] * batch, [CONTEXT] * batch, [1] * batch)
    tokens, drafts = dict.fromkeys(names, 1 + NUM_DRAFTS), {name: [1] * NUM_DRAFTS for name in names}
    seconds = []
    for _ in range(steps):
        runner.requests.computed_R[rows], runner.requests.num_drafts_R[rows] = CONTEXT, NUM_DRAFTS
        started = time.perf_counter()
        step(runner, tokens, cached, [], drafts)
        seconds.append(time.perf_counter() - started)
    for name in names:
        runner.requests.by_id[name].outputs.clear()
    finished = SchedulerOutput.make_empty()
    finished.finished_req_ids = set(names)
    runner.execute_model(finished)
    return median(seconds) * 1e6


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    llm, runner = open_runner()
    common.warn_if_busy()
    measure(runner, max(BATCHES), 20)
    rows = [{"batch": batch, "us_per_step": measure(runner, batch, options.steps)} for batch in BATCHES]
    print(f"\nHost side of a decode step, k = {NUM_DRAFTS}, no model, no drafter; {common.NOISE_NOTE}")
    print("  batch   us/step   us/row")
    for row in rows:
        print(f"  {row['batch']:5d}  {row['us_per_step']:8.0f}  {row['us_per_step'] / row['batch']:7.1f}")
    print(f"  wanted: at most {LIMIT_US:.0f} us at batch {BATCHES[-1]}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"k": NUM_DRAFTS, "rows": rows, **common.describe_machine()}, indent=2))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
