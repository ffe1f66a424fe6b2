"""All linear layers of a decode step, by kernel and number of rows, over what reading the weights costs.

python benchmarks/gemm.py --json .bench/gemm.json

Every layer has weights of its own, as in a model, so none are found in a cache. The candidates take turns within each
repetition, and figures are medians over the repetitions. "x bound" is the time over that of reading the candidate's own
bytes at the speed at which all threads read memory. The last column is how far results are off, as a share of the
largest, for weights that have 8 significant bits as those of a bfloat16 checkpoint do.

To see what a CPU without AVX-512 would choose:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import common
import torch
from torch.nn import functional as F
from vllm import _custom_ops as vllm_ops

from vllm_gaudi_spec.devices.cpu.linear import Float16Linear, Int8Linear
from vllm_gaudi_spec.tools.io.command_line import Parser

Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    hidden: int
    inter: int
    layers: int
    kv_share: int
    """Key and value heads together, over query heads, in thirds."""
    vocab: int

    def matrices(self) -> list[tuple[str, tuple[int, int]]]:
        """As vLLM calls them in a step, [outputs, inputs]: the projections that share an input are one."""
        layer = [
            ("qkv", (self.hidden + self.kv_share * self.hidden // 3, self.hidden)),
            ("o", (self.hidden, self.hidden)),
            ("gate_up", (2 * self.inter, self.hidden)),
            ("down", (self.hidden, self.inter)),
        ]
        return [*layer * self.layers, ("lm_head", (self.vocab, self.hidden))]


SIZES = {
    "demo": Size(hidden=576, inter=1536, layers=30, kv_share=2, vocab=49152),  # SmolLM2-135M
    "tiny": Size(hidden=96, inter=256, layers=2, kv_share=2, vocab=512),
}


# ---- candidates ----------------------------------------------------------------------------------------


def onednn(weight: torch.Tensor) -> Multiply:
    handler = vllm_ops.create_onednn_mm(weight.t(), 32)
    return lambda x: vllm_ops.onednn_mm(handler, x, None)


def onednn_four_rows(weight: torch.Tensor) -> Multiply:
    """Fewer than four rows are padded to four."""
    handler = vllm_ops.create_onednn_mm(weight.t(), 32)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 0, 0, max(0, 4 - x.shape[0])))
        return vllm_ops.onednn_mm(handler, padded, None)[: x.shape[0]]

    return multiply


def plain(weight: torch.Tensor) -> Multiply:
    return lambda x: F.linear(x, weight)


def transposed(weight: torch.Tensor) -> Multiply:
    columns = weight.t().contiguous()
    return lambda x: torch.mm(x, columns)


def turned(weight: torch.Tensor) -> Multiply:
    """The long dimension first."""
    return lambda x: torch.mm(weight, x.t()).t()


def torch_onednn(weight: torch.Tensor) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def mkl(weight: torch.Tensor) -> Multiply:
    """It is packed for one number of rows."""
    packed: dict[int, torch.Tensor] = {}

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows not in packed:
            packed.clear()
            packed[rows] = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        return torch.ops.mkl._mkl_linear(x, packed[rows], weight, None, rows)

    return multiply


def bfloat16(weight: torch.Tensor) -> Multiply:
    narrow = weight.bfloat16()
    return lambda x: F.linear(x.bfloat16(), narrow).float()


def bfloat16_onednn(weight: torch.Tensor) -> Multiply:
    handler = vllm_ops.create_onednn_mm(weight.bfloat16().t(), 32)
    return lambda x: vllm_ops.onednn_mm(handler, x.bfloat16(), None).float()


def bfloat16_sgl(weight: torch.Tensor) -> Multiply:
    packed, outputs = torch.ops._C.convert_weight_packed(weight.bfloat16()), weight.shape[0]
    return lambda x: vllm_ops.weight_packed_linear_cpu(x.bfloat16(), packed, outputs, None).float()


def float16(weight: torch.Tensor) -> Multiply:
    linear = Float16Linear.of(weight)
    return lambda x: linear(x, weight, None)


def int8_sgl(weight: torch.Tensor) -> Multiply:
    linear = Int8Linear(weight, wide=False)
    return lambda x: linear(x, weight, None)


def int8_onednn(weight: torch.Tensor) -> Multiply:
    linear = Int8Linear(weight, wide=True)
    return lambda x: linear(x, weight, None)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def int8_weights_only(weight: torch.Tensor) -> Multiply:
    values, scales = quantized(weight)
    return lambda x: torch._weight_int8pack_mm(x, values, scales)


def int8_fbgemm(weight: torch.Tensor) -> Multiply:
    """Activations are rounded by one scale for all rows, so a row's result depends on its neighbours."""
    values, scales = quantized(weight)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    made = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(made, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed)


def int4_weights_only(weight: torch.Tensor) -> Multiply:
    group = 32
    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // group, group)
    scales = groups.abs().amax(2) / 7
    values = ((groups / scales[..., None]).round() + 8).clamp(0, 15).to(torch.int32).view(outputs, inputs)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    both = torch.stack([scales.t(), torch.zeros_like(scales.t())], 2).bfloat16().contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, group, both).float()


# Name -> how, and bytes of a weight.
CANDIDATES: dict[str, tuple[Callable[[torch.Tensor], Multiply], float]] = {
    "oneDNN packed, as vLLM": (onednn, 4),
    "oneDNN packed, 4 rows or more": (onednn_four_rows, 4),
    "oneDNN packed, torch's": (torch_onednn, 4),
    "MKL packed": (mkl, 4),
    "F.linear": (plain, 4),
    "mm, weights transposed": (transposed, 4),
    "mm, weights first": (turned, 4),
    "float16 weights, FBGEMM": (float16, 2),
    "bfloat16, F.linear": (bfloat16, 2),
    "bfloat16, oneDNN packed": (bfloat16_onednn, 2),
    "bfloat16, vLLM's sgl kernel": (bfloat16_sgl, 2),
    "int8, vLLM's sgl kernel": (int8_sgl, 1),
    "int8, oneDNN packed": (int8_onednn, 1),
    "int8, FBGEMM": (int8_fbgemm, 1),
    "int8 weights, torch": (int8_weights_only, 1),
    "int4 weights, torch": (int4_weights_only, 0.5),
}


# ---- measuring -----------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="demo", help="size of the model")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 2, 3, 4, 5, 8, 16, 24, 32, 128],
        metavar="N",
        help="rows (tokens) per matrix",
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="times that each candidate is timed")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="only kernels with one of these texts in their names (default: all)"
    )
    parser.add_argument("--matrices", action="store_true", help="print a table for each matrix as well")
    common.add_json(parser)
    return parser.parse_args()


@dataclass
class Candidate:
    name: str
    bytes_per_weight: float
    layers: list[tuple[str, int, Multiply]]
    """Matrix, its inputs, and what multiplies with it."""
    error: float

    @classmethod
    def make(cls, name: str, weights: list[tuple[str, torch.Tensor]]) -> "Candidate":
        build, bytes_per_weight = CANDIDATES[name]
        _, first = weights[0]
        x = torch.randn(5, first.shape[1])
        exact = F.linear(x.double(), first.double())
        error = float((build(first)(x) - exact).abs().max() / exact.abs().max())
        layers = [(matrix, weight.shape[1], build(weight)) for matrix, weight in weights]
        return cls(name, bytes_per_weight, layers, error)

    def step(self, inputs: dict[int, torch.Tensor]) -> dict[str, float]:
        """Milliseconds by matrix."""
        spent: dict[str, float] = {}
        for matrix, num_inputs, multiply in self.layers:
            x = inputs[num_inputs]
            started = time.perf_counter()
            multiply(x)
            spent[matrix] = spent.get(matrix, 0.0) + 1e3 * (time.perf_counter() - started)
        return spent


def make_candidates(names: list[str], weights: list[tuple[str, torch.Tensor]]) -> list[Candidate]:
    made = []
    for name in names:
        try:
            made.append(Candidate.make(name, weights))
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            common.log(f"{name}: not on this CPU ({str(error).splitlines()[0][:100]})")
    return made


def measure(candidates: list[Candidate], rows: list[int], repeats: int) -> dict[tuple[str, int], dict[str, float]]:
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    sizes = {size for candidate in candidates for _, size, _ in candidate.layers}
    for num in rows:
        inputs = {size: torch.randn(num, size) for size in sizes}
        for turn in range(repeats + 1):
            for candidate in candidates:
                spent = candidate.step(inputs)
                if turn:  # the first one packs, and makes kernels
                    found.setdefault((candidate.name, num), []).append(spent)
    return {key: {m: median(step[m] for step in steps) for m in steps[0]} for key, steps in found.items()}


def main() -> int:
    options = parse_options()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    common.warn_if_busy()
    weights = [(name, (torch.randn(shape) * 0.03).bfloat16().float()) for name, shape in SIZES[options.size].matrices()]
    num_weights = sum(weight.numel() for _, weight in weights)
    bandwidth = common.read_bandwidth()
    selected = [name for name in CANDIDATES if options.only is None or any(text in name for text in options.only)]
    candidates = make_candidates(selected, weights)
    measured = measure(candidates, options.rows, options.repeats)
    rows = []
    for candidate in candidates:
        bound = 1e3 * num_weights * candidate.bytes_per_weight / bandwidth
        for num in options.rows:
            by_matrix = measured[candidate.name, num]
            total = sum(by_matrix.values())
            facts = {"ms": total, "bound_ms": bound, "over_bound": total / bound, "error": candidate.error}
            rows.append({"candidate": candidate.name, "rows": num, **facts, "matrices_ms": by_matrix})
    show(rows, options.rows, bandwidth, options.matrices)
    machine = common.describe_machine()
    common.write_json(options.json, {"size": options.size, "bandwidth": bandwidth, "rows": rows, "machine": machine})
    return 0


def show(rows: list[dict], nums: list[int], bandwidth: float, matrices: bool) -> None:
    common.log(f"\nmemory is read at {bandwidth / 1e9:.1f} GB/s\n\nms for all matrices (x bound)\n")
    header = ["kernel", "bound", *map(str, nums), "error"]
    by_name: dict[str, list[dict]] = {}
    for row in rows:
        by_name.setdefault(row["candidate"], []).append(row)
    lines = []
    for name, cells in by_name.items():
        values = [f"{cell['ms']:.1f} ({cell['over_bound']:.1f})" for cell in cells]
        lines.append([name, f"{cells[0]['bound_ms']:.1f}", *values, f"{cells[0]['error']:.0e}"])
    common.log(common.table(header, lines))
    for matrix in rows[0]["matrices_ms"] if matrices else ():
        lines = [[name, *(f"{cell['matrices_ms'][matrix]:.2f}" for cell in cells)] for name, cells in by_name.items()]
        common.log(f"\nms for {matrix}\n\n{common.table(['kernel', *map(str, nums)], lines)}")
    common.log(f"\n{common.NOISE_NOTE}")


if __name__ == "__main__":
    sys.exit(main())
