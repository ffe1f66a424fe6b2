"""Measure the host time of a decode step with drafts, by phase.

python -m benchmarks host_overhead --json .bench/host_overhead.json

The real runner repeats a step in which every row has k drafts. On a CPU, the models are replaced with stand-ins that
take no time. On an accelerator (VGS_DEVICE=cuda), the model and its drafter have the requested size, and calls only
launch their work; the time during which the host waits for the device is not overhead and is excluded from the sum.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

from benchmarks.shared import common, dummy
from benchmarks.shared.phases import PHASES, Phases
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.tools.io.command_line import Parser

NUM_DRAFTS = 4
CONTEXT = 512
LIMIT_US = 1500.0


class FreeModel:
    """A stand-in for vLLM's model that returns tensors of the correct shapes with arbitrary values."""

    VOCAB = 64

    def __init__(self, rows: int, hidden_size: int) -> None:
        num_tokens = max(rows * (1 + NUM_DRAFTS), 2 * CONTEXT)
        self._hidden = torch.zeros(num_tokens, hidden_size)
        self._logits = torch.zeros(num_tokens, self.VOCAB)

    def __call__(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self._hidden[: len(token_ids_T)]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], metavar="B", help="batch sizes")
    parser.add_argument(
        "--method",
        choices=("ngram", "draft_model"),
        help="how to draft (default: ngram; draft_model on an accelerator)",
    )
    parser.add_argument("--overlap", action="store_true", help="async scheduling, for draft_model")
    parser.add_argument("--size", choices=dummy.DRAFTERS, default="tiny", help="size of the models, on an accelerator")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps that are timed")
    common.add_json(parser)
    options = parser.parse_args()
    options.method = options.method or ("draft_model" if dummy.on_accelerator() else "ngram")
    return options


def engine(options: argparse.Namespace) -> Any:
    rows, shape = max(options.batches), dummy.SIZES[options.size]
    spec_config: dict[str, Any] = {"method": options.method}
    drafter = dummy.DRAFTERS[options.size]
    if options.method == "ngram":
        spec_config, drafter = spec_config | {"prompt_lookup_max": 3}, None
    return dummy.engine(
        options.size,
        spec_config | {"num_speculative_tokens": NUM_DRAFTS},
        drafter,
        max_model_len=2 * CONTEXT,
        max_num_seqs=rows,
        max_num_batched_tokens=2 * CONTEXT,
        kv_cache_memory_bytes=4 * CONTEXT * dummy.kv_bytes(shape, dummy.DTYPES[options.size]),
        async_scheduling=options.overlap,
        gaudi_spec={"batch_buckets": options.batches, "prefill_buckets": [2 * CONTEXT], "warmup_tokens": 0},
    )


def free_of_models(runner: Any) -> None:
    """Replace the models, because on a CPU they would run on the host and add to its time."""
    for loaded in filter(None, (runner.target, runner.drafter)):
        loaded.model = FreeModel(runner.max_rows, loaded.model.config.hidden_size)
    if runner.drafter is None:
        runner.drafting.propose_on_host = lambda step, max_drafts: None


# ---- steps ---------------------------------------------------------------------------------------------


def admit(runner: Any, names: list[str]) -> None:
    """Add requests of which one context token is left to compute."""
    # All requests use the same few blocks, because the location of a row's KV does not affect the host.
    block_ids = list(range(1, 1 + -(-(CONTEXT + 2 * NUM_DRAFTS) // min(runner.kv_cache.block_sizes))))
    new = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[i % 60 for i in range(CONTEXT)],
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=CONTEXT),
            pooling_params=None,
            block_ids=tuple(block_ids for _ in runner.kv_cache.block_sizes),
            num_computed_tokens=CONTEXT - 1,
            lora_request=None,
        )
        for name in names
    ]
    step(runner, dict.fromkeys(names, 1), CachedRequestData.make_empty(), new, {})


def step(runner: Any, tokens: dict[str, int], cached: Any, new: list[Any], drafts: dict[str, list[int]]) -> None:
    scheduled = SpecSchedulerOutput(
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
    runner.execute_model(scheduled)
    answer = runner.sample_tokens(None)
    if runner.async_scheduling:
        answer.get_output()
    else:
        runner.take_draft_token_ids()


def measure(runner: Any, phases: Phases, batch: int, steps: int) -> dict[str, Any]:
    """Return the median microseconds for a step and each of its phases. Lengths are reset so that all steps are
    equal."""
    names = [f"{batch}-{i}" for i in range(batch)]
    admit(runner, names)
    rows = torch.tensor([runner.requests.by_id[name].row for name in names], device=runner.backend.traits.torch_device)
    cached = CachedRequestData(names, set(), [], {}, [None] * batch, [CONTEXT] * batch, [1] * batch)
    tokens, drafts = dict.fromkeys(names, 1 + NUM_DRAFTS), {name: [1] * NUM_DRAFTS for name in names}
    taken = []
    for _ in range(steps):
        runner.requests.computed_R[rows], runner.requests.num_drafts_R[rows] = CONTEXT, NUM_DRAFTS
        if (history := getattr(runner.drafting, "_history", None)) is not None:  # drafts of a host drafter
            history._drafts_np[rows.tolist()] = [NUM_DRAFTS, *[1] * NUM_DRAFTS]
        runner.backend.memory.synchronize()
        phases.take()
        started = time.perf_counter()
        step(runner, tokens, cached, [], drafts)
        seconds = time.perf_counter() - started
        spent = phases.take()
        taken.append({**spent, "sum": seconds - spent.get("wait", 0.0)})
    for name in names:
        runner.requests.by_id[name].outputs.clear()
    finished = SpecSchedulerOutput.make_empty()
    finished.finished_req_ids = set(names)
    runner.execute_model(finished)
    middle = {name: 1e6 * median(one.get(name, 0.0) for one in taken) for name in (*PHASES, "sum")}
    return {"batch": batch, "us_per_step": middle.pop("sum"), "wait_us": middle.pop("wait"), "phases_us": middle}


def show(rows: list[dict[str, Any]]) -> None:
    common.log(f"\nmicroseconds of the host in a decode step, k = {NUM_DRAFTS}, context {CONTEXT}\n")
    names = list(rows[0]["phases_us"])
    lines = [
        [str(row["batch"]), *(f"{row['phases_us'][name]:.0f}" for name in names), f"{row['us_per_step']:.0f}"]
        for row in rows
    ]
    common.log(common.markdown(["batch", *names, "sum"], lines))
    if not dummy.on_accelerator():
        common.log(f"\nwanted: at most {LIMIT_US:.0f} at batch 256. {common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    common.warn_if_busy()
    with engine(options) as llm:
        runner = dummy.runner_of(llm)
        if not dummy.on_accelerator():
            free_of_models(runner)
        with Phases().watching(runner) as phases, torch.inference_mode():
            measure(runner, phases, max(options.batches), 20)
            rows = [measure(runner, phases, batch, options.steps) for batch in options.batches]
        show(rows)
        machine = dummy.describe_machine()
        common.write_rows(options, ("method", "overlap", "size"), rows, machine, k=NUM_DRAFTS, context=CONTEXT)
    return 0
