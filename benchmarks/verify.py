"""Compare a [B, k+1] verify step with a plain [B, 1] step and with the flattened layout.

python -m benchmarks verify --json .bench/verify.json
VGS_DEVICE=cuda python -m benchmarks verify --size 8b --json .bench/verify.json

VGS_DEVICE=hpu python -m benchmarks verify --size 8b --json .bench/verify.json

This program runs the runner's own graphs with a chosen context. A step consists of the forward pass and the
verification after it. On a GPU, only the device's own time is measured. "Flattened" is the layout with one row per
token, [B*(k+1), 1], in which rows repeat the blocks of their request. Only its forward pass differs, so its step is
that forward pass with the verification of padded rows. The roofline is the time to read what a plain step must read
(the weights and the KV of all rows) at the datasheet's bandwidth and at that of a large copy. Each graph is captured
when it is first needed rather than in a warm-up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

from benchmarks.shared import common, dummy
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.records import Planned
from vllm_gaudi_spec.runner.planning import make_sample_batch
from vllm_gaudi_spec.tools.io.command_line import Parser

CHUNK = 256
GRIDS = {
    "8b": {"batches": [1, 8, 32], "contexts": [512, 2048, 4096, 8192, 16384]},
    "1.5b": {"batches": [1, 8, 32], "contexts": [512, 2048, 8192]},
    "tiny": {"batches": [1, 4], "contexts": [64, 256]},
}
FULL_K = 4
"""The number of drafts that is measured with every context and with flattened rows."""


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--size", choices=GRIDS, default="tiny", help="size of the model, and which batches and contexts"
    )
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="batch sizes (default: by --size)")
    parser.add_argument(
        "--contexts", type=int, nargs="+", metavar="N", help="tokens of KV per request (default: by --size)"
    )
    common.add_num_drafts(parser, "drafts", [1, 2, 3, 4, 5])
    parser.add_argument(
        "--middle", type=int, metavar="N", help="the context at which every k is measured (default: by --size)"
    )
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="times that each step is timed")
    common.add_json(parser)
    options = parser.parse_args()
    for name, values in GRIDS[options.size].items():
        setattr(options, name, getattr(options, name) or values)
    options.middle = options.middle or options.contexts[len(options.contexts) // 2]
    return options


def engine(options: argparse.Namespace) -> Any:
    max_drafts, longest = max(options.drafts), max(options.contexts) + CHUNK
    rows = max(options.batches) * (1 + max_drafts)
    per_token = dummy.kv_bytes(dummy.SIZES[options.size], dummy.DTYPES[options.size])
    return dummy.engine(
        options.size,
        # The drafts themselves do not matter, and this drafter has no weights.
        {"method": "ngram_gpu", "num_speculative_tokens": max_drafts, "prompt_lookup_max": 3},
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=max(CHUNK, rows * (1 + max_drafts)),
        kv_cache_memory_bytes=int(1.02 * per_token * (max(options.batches) + 1) * (longest + CHUNK)),
        gaudi_spec={
            # The batch sizes of verify steps, and the numbers of rows after flattening.
            "batch_buckets": sorted({*options.batches, rows}),
            "prefill_buckets": [min(longest, max(CHUNK, rows * (1 + max_drafts)))],
            "warmup_tokens": 0,
        },
    )


class Steps:
    """Steps of requests that share no context, with enough rows for the flattened layout."""

    def __init__(self, runner: Any, batches: int, copies: int, longest: int) -> None:
        self._runner = runner
        self._synchronize = runner.backend.memory.synchronize
        self._rows = [[f"{row}-{copy}" for copy in range(copies)] for row in range(batches)]
        sizes = runner.kv_cache.block_sizes
        new = []
        for row, names in enumerate(self._rows):
            count = -(-longest // min(sizes))
            block_ids = tuple(list(range(1 + row * count, 1 + (row + 1) * count)) for _ in sizes)
            new += [self._arrival(name, block_ids, longest) for name in names]
        scheduled = SpecSchedulerOutput.make_empty()
        scheduled.scheduled_new_reqs = new
        runner.execute_model(scheduled)

    def _arrival(self, name: str, block_ids: tuple[list[int], ...], longest: int) -> NewRequestData:
        return NewRequestData(
            req_id=name,
            prompt_token_ids=[3 + i % 400 for i in range(longest - CHUNK)],
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=CHUNK),
            pooling_params=None,
            block_ids=block_ids,
            num_computed_tokens=0,
            lora_request=None,
        )

    def set_context(self, context: int, num_drafts: int) -> Callable[[], None]:
        """Return a function that sets the number of drafts and the context of each request, one token more per copy."""
        requests = self._runner.requests
        computed_R = torch.zeros_like(requests.computed_R)
        for names in self._rows:
            for copy, name in enumerate(names):
                request = requests.by_id[name]
                request.num_computed = context + copy
                computed_R[request.row] = context + copy

        def put() -> None:
            requests.computed_R.copy_(computed_R)
            requests.num_drafts_R.fill_(num_drafts)

        return put

    def forward(self, names: list[str], queries: int) -> Callable[[], Any]:
        runner = self._runner
        members = [runner.requests.by_id[name] for name in names]
        ends = [request.num_computed + queries for request in members]
        shape = runner.shapes.decode(queries, ends, last_block=runner.requests.find_last_block(members))
        shape = shape._replace(rows=len(members))
        planned = Planned(
            shape=shape,
            requests=members,
            counts=[queries] * len(members),
            ends=ends,
            finishes=[True] * len(members),
        )
        batch = runner.make_batch(planned)
        return partial(runner.device_step.forward, shape.phase, queries, batch.inputs)

    def finish(self, names: list[str], queries: int) -> Callable[[], Any]:
        runner = self._runner
        members = [runner.requests.by_id[name] for name in names]
        branch, num_positions = runner.sampling.branch(members, {}), [queries] * len(members)
        shape = runner.sample_shapes.fit(queries, num_positions, branch)
        batch = make_sample_batch(runner.requests, shape, members, num_positions)
        return partial(runner.device_step.finish, runner.sampling.make_pass(batch, branch, {}))

    def seconds(self, batch: int, context: int, num_drafts: int, repeats: int) -> dict[str, float]:
        """Return the seconds of the forward pass with padded rows, of its verification, and of both."""
        put = self.set_context(context, num_drafts)
        names = [row[0] for row in self._rows[:batch]]
        forward, finish = self.forward(names, 1 + num_drafts), self.finish(names, 1 + num_drafts)

        def step() -> None:
            forward()
            finish()

        return {
            "forward": dummy.seconds_of(forward, put, repeats, self._synchronize),
            "finish": dummy.seconds_of(finish, put, repeats, self._synchronize),
            "step": dummy.seconds_of(step, put, repeats, self._synchronize),
        }

    def flattened(self, batch: int, context: int, num_drafts: int, repeats: int) -> float:
        """Return the seconds of a forward pass with the same number of tokens, one per row."""
        put = self.set_context(context, 0)
        names = [name for row in self._rows[:batch] for name in row[: 1 + num_drafts]]
        return dummy.seconds_of(self.forward(names, 1), put, repeats, self._synchronize)


# ---- figures -------------------------------------------------------------------------------------------


def cells(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Yield batch size, context and k: every k with one context, and one k with every context."""
    full = FULL_K if FULL_K in options.drafts else options.drafts[-1]
    return [
        (batch, context, k)
        for batch, context, k in product(options.batches, options.contexts, options.drafts)
        if k == full or context == options.middle
    ]


def measure(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    shape, dtype = dummy.SIZES[options.size], dummy.DTYPES[options.size]
    weights, per_token = dummy.weight_bytes(shape, dtype), dummy.kv_bytes(shape, dtype)
    rows = []
    with engine(options) as llm, torch.inference_mode():
        bandwidth = dummy.bandwidth()
        dummy.fill_kv(llm)
        longest = max(options.contexts) + CHUNK
        steps = Steps(dummy.runner_of(llm), max(options.batches), 1 + max(options.drafts), longest)
        plain = {
            (batch, context): steps.seconds(batch, context, 0, options.repeats)
            for batch, context in product(options.batches, options.contexts)
        }
        for batch, context, k in cells(options):
            verify = steps.seconds(batch, context, k, options.repeats)
            flat = steps.flattened(batch, context, k, options.repeats) + verify["finish"]
            read = weights + batch * context * per_token
            without_drafts = plain[batch, context]
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "k": k,
                    "plain_ms": 1e3 * without_drafts["step"],
                    "plain_forward_ms": 1e3 * without_drafts["forward"],
                    "verify_ms": 1e3 * verify["step"],
                    "verify_forward_ms": 1e3 * verify["forward"],
                    "flattened_ms": 1e3 * flat,
                    "verify_ratio": verify["step"] / without_drafts["step"],
                    "flattened_ratio": flat / without_drafts["step"],
                    "read_bytes": read,
                    "plain_over_roofline": {
                        name: without_drafts["step"] * rate / read for name, rate in bandwidth.items()
                    },
                }
            )
            common.log(f"batch {batch}, context {context}, k = {k}: {rows[-1]['verify_ratio']:.2f}")
    return bandwidth, rows


def show(rows: list[dict[str, Any]], bandwidth: dict[str, float], size: str) -> None:
    names = ["batch", "context", "k", "plain_ms", "verify_ms", "verify_ratio", "flattened_ms", "flattened_ratio"]
    header = [name.replace("_", " ") for name in names] + [f"plain / {name} roofline" for name in bandwidth]
    lines = []
    for row in rows:
        cell = [f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in names]
        lines.append([*cell, *(f"{row['plain_over_roofline'][name]:.2f}" for name in bandwidth)])
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in bandwidth.items())
    common.log(f"\n{size} dummy weights, greedy; bandwidth {rates}\n\n{common.markdown(header, lines)}")


def main() -> int:
    options = parse_options()
    common.warn_if_busy()
    bandwidth, rows = measure(options)
    show(rows, bandwidth, options.size)
    report = {"size": options.size, "bandwidth": bandwidth, "rows": rows, "machine": dummy.describe_machine()}
    common.write_json(options.json, report)
    return 0
