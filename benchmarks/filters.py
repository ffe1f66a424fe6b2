"""Compare filters and sampling with upstream's filters on the same logits.

python -m benchmarks filters                       # the CPU
python -m benchmarks filters --device cuda         # replays of CUDA graphs, inputs in turn so that none is in the cache

Logits are like those of a language model, or flat (normal, as with dummy weights), at temperature 1. `sample` means
sampling a token among those that top-p keeps. Upstream's filters are those of its older runner (`v1/sample/ops`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from benchmarks.shared import common
from vllm_gaudi_spec.tools.io.command_line import Parser

if TYPE_CHECKING:
    from vllm_gaudi_spec.sampling.rules.registry import Rules

RULES = {"cpu": "vllm_gaudi_spec.devices.cpu.rules", "cuda": "vllm_gaudi_spec.devices.cuda.rules"}
FILTERS = {"top-p 0.9": (0.0, 0, 0.9), "top-k 50, top-p 0.9": (0.0, 50, 0.9), "min-p 0.05": (0.05, 0, 1.0)}
SETS = 8
SECONDS = 0.3

Run = Callable[[torch.Tensor], object]


def make_logits(batch: int, vocab: int, even: bool, device: str, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocab, generator=random) * (1.0 if even else 2.5)
    if not even:
        best = torch.randint(vocab, (batch, 20), generator=random)
        logits.scatter_add_(1, best, torch.rand(batch, 20, generator=random) * 15)
    return logits.to(device)[:, None]


def milliseconds(run: Run, inputs: list[torch.Tensor]) -> float:
    """Return the median time per input."""
    if inputs[0].device.type == "cpu":
        return _host_milliseconds(run, inputs)
    for one in inputs:
        run(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in inputs:
            run(one)
    times: list[float] = []
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    stop = time.perf_counter() + SECONDS
    while time.perf_counter() < stop or len(times) < 5:
        ends[0].record()
        graph.replay()
        ends[1].record()
        ends[1].synchronize()
        times.append(ends[0].elapsed_time(ends[1]) / len(inputs))
    return statistics.median(times)


def _host_milliseconds(run: Run, inputs: list[torch.Tensor]) -> float:
    times: list[float] = []
    stop = time.perf_counter() + SECONDS
    while time.perf_counter() < stop or len(times) < 5:
        begin = time.perf_counter()
        run(inputs[len(times) % len(inputs)])
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def upstream(min_p: float, top_k: int, top_p: float, batch: int, device: str) -> Run | None:
    """Return upstream's filters, which work in place on a copy, or None for min-p, part of its sampler."""
    if min_p:
        return None
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    k_B = torch.full((batch,), top_k, device=device, dtype=torch.int32) if top_k else None
    p_B = torch.full((batch,), top_p, device=device)
    return lambda logits: apply_top_k_top_p(logits.squeeze(1).clone(), k_B, p_B)


def cell(rules: Rules, batch: int, vocab: int, even: bool, device: str) -> dict[str, float]:
    inputs = [make_logits(batch, vocab, even, device, seed) for seed in range(SETS if batch > 8 else 2 * SETS)]
    keys_B2 = torch.arange(2 * batch, device=device, dtype=torch.int32).view(batch, 2)
    positions_B1 = torch.full((batch, 1), 7, device=device, dtype=torch.int32)
    temperature_B = torch.ones(batch, device=device)
    found: dict[str, float] = {}
    kept: list[torch.Tensor] = []
    for name, (min_p, top_k, top_p) in FILTERS.items():
        asked = (
            torch.full((batch,), min_p, device=device) if min_p else None,
            torch.full((batch,), top_k, device=device, dtype=torch.int32) if top_k else None,
            torch.full((batch,), top_p, device=device) if top_p < 1 else None,
        )
        found[name] = milliseconds(lambda one, asked=asked: rules.filter_logits(one, *asked), inputs)  # type: ignore[misc]
        if not kept:
            kept = [rules.filter_logits(one, *asked) for one in inputs]
        if theirs := upstream(min_p, top_k, top_p, batch, device):
            found[f"upstream, {name}"] = milliseconds(theirs, inputs)
    found["sample"] = milliseconds(lambda one: rules.sample_random(one, temperature_B, keys_B2, positions_B1), kept)
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=RULES, default="cpu", help="where (default: cpu)")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="positions (default: 1 8 32)"
    )
    parser.add_argument(
        "--vocab", type=int, nargs="+", default=[49_152, 128_256], metavar="V", help="sizes (default: 49152 128256)"
    )
    common.add_json(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    rules: Rules = import_module(RULES[args.device]).RULES
    rows = []
    with torch.inference_mode():
        for vocab in args.vocab:
            for batch in args.batch:
                for even in (False, True):
                    found = cell(rules, batch, vocab, even, args.device)
                    rows.append({"vocab": vocab, "batch": batch, "logits": "even" if even else "model", **found})
                    common.log(" | ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in rows[-1].values()))
    common.log(" | ".join(rows[0]))
    common.write_json(args.json, rows)
