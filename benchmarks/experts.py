"""One layer of experts in each form: ms and peak memory by tokens, and whether the form that is chosen is the fastest.

python benchmarks/experts.py --shape 32,4,512,256 --shape 128,8,512,192
python benchmarks/experts.py --device cuda --dtype bfloat16 --shape 32,4,2048,1024 --shape 128,8,2048,768

A shape is experts, experts of a token, hidden and inner size. The forms take turns, and the least time of each counts:
what else runs on the machine only adds to it. On CUDA a form is run as a captured graph, as it is when served. Results
are compared with those of every expert for every token. "all at once" is what the dense form was before it was cut
into slices, "Gaudi's, emulated" is Gaudi's operator as the emulated card computes it: its time is not a Gaudi's.
Memory is what a form needs beside weights and inputs. A form whose first run takes more than --limit seconds is left
out. The last columns have the form that is chosen where a device has an operator of its own and where it has none, and
its time over that of the fastest that there is then.
"""

import argparse
import platform
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import common
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_gaudi_spec.devices.common import experts
from vllm_gaudi_spec.devices.common.experts import Call, Form, Fused
from vllm_gaudi_spec.devices.cuda import experts as cuda_experts
from vllm_gaudi_spec.emulator.gaudi.experts import fused_weights
from vllm_gaudi_spec.tools.io.command_line import Parser

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""As a share of the largest result."""


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    inner: int


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where they are computed")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and states")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="E,K,H,I",
        type=lambda text: Shape(*map(int, text.split(","))),
        help="of a layer, as often as wanted (default: two)",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 8, 64, 512, 2048], metavar="T", help="of a forward"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--repeats", type=int, default=7, help="at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each form and number of tokens, at least")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds")
    common.add_json(parser)
    return parser.parse_args()


# ---- forms ---------------------------------------------------------------------------------------------


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.nn.functional.grouped_mm(rows, matrices, offs=counts.cumsum(0).int())
    return result


def all_at_once(call: Call) -> torch.Tensor:
    weights = call.weights_TE.T.unsqueeze(-1)
    inner = call.inner(torch.matmul(call.x_TH, call.w13_EJH.transpose(1, 2)), weights, None)
    return torch.matmul(inner, call.w2_EHI.transpose(1, 2)).sum(0)


def gaudis(call: Call) -> torch.Tensor:
    ids, weights = call.chosen()
    w12, w3 = call.w13_EJH.unbind(), call.w2_EHI.unbind()
    return fused_weights(call.x_TH, ids, weights, w12, w3, True, "silu", 0, len(w12) - 1)


FORMS: dict[str, Form] = {
    "all at once": all_at_once,
    "dense": experts.dense,
    "gathered": experts.gathered,
    "grouped": partial(experts.grouped, grouped_product),
    "Gaudi's, emulated": gaudis,
}


def make_call(shape: Shape, tokens: int, weights: tuple[torch.Tensor, torch.Tensor]) -> Call:
    w13, w2 = weights
    logits = torch.randn(tokens, shape.experts, device=w13.device)
    return Call(
        x_TH=torch.randn(tokens, shape.hidden, device=w13.device, dtype=w13.dtype),
        weights_TE=experts.route(logits, top_k=shape.top_k, scoring="softmax", renormalize=True).to(w13.dtype),
        w13_EJH=w13,
        b13_EJ=None,
        w2_EHI=w2,
        b2_EH=None,
        activation=MoEActivation.SILU,
        weighs_inputs=False,
        top_k=shape.top_k,
    )


# ---- measuring -----------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes that results need at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage())._cdata not in known | self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._ended, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _ended(self, storage: int, nbytes: int) -> None:
        self.seen.discard(storage)
        self.now -= nbytes


def peak_of(form: Form, call: Call) -> int:
    if call.x_TH.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        form(call)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with Peak() as peak:
        form(call)
    return peak.most


def runner_of(form: Form, call: Call) -> Callable[[], float]:
    """Seconds of one run."""
    if not call.x_TH.is_cuda:

        def run() -> float:
            start = time.perf_counter()
            form(call)
            return time.perf_counter() - start

        return run
    form(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        form(call)

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    return replay


def measure(
    shape: Shape, tokens: int, weights: tuple[torch.Tensor, torch.Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    call = make_call(shape, tokens, weights)
    forms = dict(FORMS)
    if tokens * shape.top_k >= shape.experts:
        del forms["gathered"]  # of all experts
    expected = all_at_once(call).float()
    runs, peaks, seconds = {}, {}, {}
    for name, form in forms.items():
        start = time.perf_counter()
        try:
            wrong = float((form(call).float() - expected).abs().max() / expected.abs().max())
            assert wrong < TOLERANCE[call.x_TH.dtype], f"{name} is off by {wrong}"
            if time.perf_counter() - start > options.limit:
                continue
            peaks[name] = peak_of(form, call)
            runs[name] = runner_of(form, call)
        except RuntimeError as error:  # a product that torch lacks, or that reads on the host, which is not captured
            common.log(f"{name}, {tokens} tokens: {str(error).splitlines()[0]}")
            continue
        seconds[name] = float("inf")
    turns = 0
    start = time.perf_counter()
    while turns < options.repeats or time.perf_counter() - start < options.seconds * len(runs):
        turns += 1
        for name, run in runs.items():
            seconds[name] = min(seconds[name], run())
    names: dict[Form, str] = {experts.dense: "dense", experts.gathered: "gathered"}
    return {
        "tokens": tokens,
        "ms": {name: 1000 * value for name, value in seconds.items()},
        "peak": peaks,
        "with an operator": names.get(experts.form_of(call, fused_of(call)), "grouped"),
        "without": names[experts.form_of(call, None)],
    }


def fused_of(call: Call) -> Fused | None:
    """That of the backend for CUDA. A CPU stands for a card that has one: there, vLLM's own kernel serves models."""
    return cuda_experts.fused() if call.x_TH.is_cuda else Fused(FORMS["grouped"], lambda call: True, 1)


def report(shape: Shape, rows: list[dict[str, Any]]) -> None:
    common.log(f"\nE={shape.experts}, K={shape.top_k}, H={shape.hidden}, I={shape.inner}: ms (peak MB)")
    names = list(FORMS)
    common.log("| tokens | " + " | ".join(names) + " | chosen with an operator | without |")
    common.log("| --- |" + " --- |" * (len(names) + 2))
    for row in rows:
        ms, peak = row["ms"], row["peak"]
        cells = [f"{ms[name]:.3g} ({peak[name] / 1e6:.3g})" if name in ms else "-" for name in names]
        plain = min(ms[name] for name in ("all at once", "dense", "gathered") if name in ms)
        best = min(plain, ms.get("grouped", plain))
        for kind, fastest in (("with an operator", best), ("without", plain)):
            cells.append(f"{row[kind]}, {ms[row[kind]] / fastest:.2f}")
        common.log(f"| {row['tokens']} | " + " | ".join(cells) + " |")


@torch.inference_mode()
def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    common.log(f"torch {torch.__version__}, {platform.machine()}, {where}, {options.dtype}. {common.NOISE_NOTE}")
    results = []
    for shape in options.shape or [Shape(32, 4, 512, 256), Shape(128, 8, 512, 192)]:
        torch.manual_seed(0)
        sizes = ((shape.experts, 2 * shape.inner, shape.hidden), (shape.experts, shape.hidden, shape.inner))
        w13, w2 = (torch.randn(size, device=device).mul_(0.05).to(dtype) for size in sizes)
        rows = [measure(shape, tokens, (w13, w2), options) for tokens in options.tokens]
        report(shape, rows)
        results.append({"shape": shape._asdict(), "rows": rows})
    common.write_json(options.json, results)


if __name__ == "__main__":
    sys.exit(main())
