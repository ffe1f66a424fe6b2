"""KV read by a verify step on the emulated Gaudi: flattened rows with repeated block tables, and our rectangle.

python benchmarks/gaudi_layout.py --json .bench/gaudi_layout.json

The existing Gaudi worker turns B requests with k drafts each into B * (k + 1) rows of one token, each with the block
table of its request. That layout is written here for comparison, over the same attention as ours. Every case is run
twice: small and with values, for the bytes and the outputs; and with the shapes of Llama-3.1-8B and without values, for
the time. Times are estimates of vllm_gaudi_spec/emulator/cost.py, and high ones: each operation is taken to read and
write memory, where a compiler fuses some. Nothing here ran on a Gaudi.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from vllm_gaudi_spec import emulator

emulator.install(generation="gaudi2", lazy=True)  # before torch makes a tensor of ours

import common  # noqa: E402
import torch  # noqa: E402

from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, FlatBlocks  # noqa: E402
from vllm_gaudi_spec.config import GAUDIS  # noqa: E402
from vllm_gaudi_spec.devices.hpu.backend import TRAITS, DeviceBackend, KVPair, make_backend  # noqa: E402
from vllm_gaudi_spec.emulator import cost  # noqa: E402
from vllm_gaudi_spec.emulator.card import DEVICE  # noqa: E402
from vllm_gaudi_spec.emulator.counters import Tally  # noqa: E402
from vllm_gaudi_spec.tools.io.command_line import Parser  # noqa: E402

BATCHES = (1, 8, 32)
CONTEXTS = (128, 1024, 4096)
DRAFTS = (1, 3, 5)
NUM_LAYERS = 32
TOLERANCE = 1e-5

Attend = Callable[["KVPair", torch.Tensor, "Rows"], torch.Tensor]


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    """Tokens of KV of each request, those of the step included."""
    drafts: int

    @property
    def queries(self) -> int:
        return self.drafts + 1


@dataclass(frozen=True)
class Rows:
    """A rectangle over a list of blocks, on the host or on the device."""

    starts_B: torch.Tensor
    table_BW: torch.Tensor
    listed_3N: torch.Tensor

    @property
    def entries(self) -> int:
        return self.listed_3N.shape[1]

    def moved(self) -> Rows:
        return Rows(*(tensor.to("hpu") for tensor in (self.starts_B, self.table_BW, self.listed_3N)))


@dataclass(frozen=True)
class Outcome:
    batch: int
    context: int
    drafts: int
    blocks: int
    listed_bytes: int
    """Keys and values of the blocks that the requests have, once."""
    ours_bytes: int
    flattened_bytes: int
    difference: float
    """The largest between the outputs of the two layouts."""
    estimated_ms: dict[str, dict[str, float]]
    """By generation and layout: attention of a step, all layers of Llama-3.1-8B."""

    @property
    def ours_ratio(self) -> float:
        return self.ours_bytes / self.listed_bytes

    @property
    def flattened_ratio(self) -> float:
        return self.flattened_bytes / self.listed_bytes


SMALL = AttentionLayerSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    scale=0.25,
    sliding_window=None,
    logits_soft_cap=0.0,
    dtype=torch.float32,
    block_size=TRAITS.block_size,
)
LLAMA_8B = replace(SMALL, num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5, dtype=torch.bfloat16)


# ---- the two layouts -----------------------------------------------------------------------------------


def rectangle(case: Case, spec: AttentionLayerSpec, seed: int = 0) -> Rows:
    """Ours: one row a request, its blocks listed once. Blocks are scattered; block 0 is the pad block."""
    width = -(-case.context // spec.block_size)
    order = torch.randperm(case.batch * width, generator=torch.Generator().manual_seed(seed)) + 1
    table = order.view(case.batch, width).int()
    starts = torch.full((case.batch,), case.context - case.queries, dtype=torch.int32)
    rows = torch.arange(case.batch, dtype=torch.int32).repeat_interleave(width)
    offsets = torch.arange(width, dtype=torch.int32).repeat(case.batch)
    return Rows(starts, table, torch.stack((table.flatten(), rows, offsets)))


def flattened(ours: Rows, queries: int) -> Rows:
    """The existing worker's: each query is a row with the whole table of its request."""
    batch, width = ours.table_BW.shape
    starts = (ours.starts_B[:, None] + torch.arange(queries, dtype=torch.int32)).flatten()
    table = ours.table_BW.repeat_interleave(queries, dim=0)
    rows = torch.arange(batch * queries, dtype=torch.int32).repeat_interleave(width)
    offsets = torch.arange(width, dtype=torch.int32).repeat(batch * queries)
    return Rows(starts, table, torch.stack((table.flatten(), rows, offsets)))


def make_attend(backend: DeviceBackend, spec: AttentionLayerSpec, queries: int) -> Attend:
    """The backend's attention over rows of so many queries."""

    def attend(keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        starts, table, listed = rows
        call = AttentionCall(
            num_rows=starts.shape[0],
            num_queries=queries,
            starts_B=starts,
            block_table_BW=table,
            flat=FlatBlocks(*listed.unbind(0)),
        )
        return backend.attention.attend(query, KVPair(keys, values, spec.block_size), call, spec)

    program = backend.graphs.graph(attend)

    def run(kv: KVPair, query: torch.Tensor, rows: Rows) -> torch.Tensor:
        return program(kv.keys, kv.values, query, rows.starts_B, rows.table_BW, rows.listed_3N)

    return run


def make_cache(num_blocks: int, spec: AttentionLayerSpec, seed: int = 0) -> KVPair:
    """`num_blocks` and the pad block, filled with noise; reads of it are counted as KV."""
    shape = ((num_blocks + 1) * spec.block_size, spec.num_kv_heads, spec.head_size)
    noise = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(shape, generator=noise).to(spec.dtype).to("hpu") for _ in range(2))
    return KVPair(emulator.tag_kv(keys), emulator.tag_kv(values), spec.block_size)


def block_bytes(spec: AttentionLayerSpec) -> int:
    """Keys and values of a block."""
    return 2 * spec.block_size * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize


# ---- measuring -----------------------------------------------------------------------------------------


def replayed(attend: Attend, kv: KVPair, query: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, Tally]:
    """The output and the counts of a step that is captured already."""
    rows = rows.moved()
    attend(kv, query, rows)
    DEVICE.next_step()
    out = attend(kv, query, rows)
    return out.cpu(), DEVICE.next_step()


def shapes_only(spec: AttentionLayerSpec, case: Case, rows: Rows, queries: int) -> Tally:
    """Counts of the attention of all layers as one graph, from shapes alone."""
    backend = make_backend()
    backend.graphs.graph = lambda function: function  # type: ignore[method-assign]
    with backend.graphs.compiling_only():
        kv = make_shapes((case.batch * rows.table_BW.shape[1] + 1) * spec.block_size, spec)
        query = torch.empty(case.batch * case.queries, spec.num_heads, spec.head_size, dtype=spec.dtype, device="hpu")
        rows = rows.moved()
        DEVICE.next_step()
        make_attend(backend, spec, queries)(kv, query, rows)
        tally = DEVICE.next_step()
    # What each layer does, once a layer; in a graph there is one launch, and no operation is issued on its own.
    sums = {name: getattr(tally, name) * NUM_LAYERS for name in ("bytes_moved", "kv_bytes_read", "flops")}
    return Tally(launches=1, **sums)


def make_shapes(num_slots: int, spec: AttentionLayerSpec) -> KVPair:
    shape = (num_slots, spec.num_kv_heads, spec.head_size)
    keys, values = (torch.empty(shape, dtype=spec.dtype, device="hpu") for _ in range(2))
    return KVPair(emulator.tag_kv(keys), emulator.tag_kv(values), spec.block_size)


def measure(case: Case) -> Outcome:
    backend = make_backend()
    ours = rectangle(case, SMALL)
    theirs = flattened(ours, case.queries)
    kv = make_cache(ours.entries, SMALL)
    shape = (case.batch * case.queries, SMALL.num_heads, SMALL.head_size)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to("hpu")
    outputs, tallies = [], []
    estimates: dict[str, dict[str, float]] = {generation: {} for generation in GAUDIS}
    for name, rows, queries in (("ours", ours, case.queries), ("flattened", theirs, 1)):
        out, tally = replayed(make_attend(backend, SMALL, queries), kv, query, rows)
        outputs.append(out)
        tallies.append(tally)
        full = shapes_only(LLAMA_8B, case, rows, queries)
        # The same program, once with values and once without: both ways of counting must agree.
        scale = NUM_LAYERS * block_bytes(LLAMA_8B) / block_bytes(SMALL)
        if full.kv_bytes_read != tally.kv_bytes_read * scale:
            raise RuntimeError(f"{case}: {full.kv_bytes_read} bytes of KV from shapes, {tally.kv_bytes_read} small")
        for generation in GAUDIS:
            estimates[generation][name] = 1e3 * cost.step_seconds(full, generation)
    return Outcome(
        **asdict(case),
        blocks=ours.entries,
        listed_bytes=ours.entries * block_bytes(SMALL),
        ours_bytes=tallies[0].kv_bytes_read,
        flattened_bytes=tallies[1].kv_bytes_read,
        difference=float((outputs[0] - outputs[1]).abs().max()),
        estimated_ms=estimates,
    )


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="B", help="batch sizes")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="tokens of KV per request"
    )
    common.add_num_drafts(parser, "drafts", list(DRAFTS))
    common.add_json(parser)
    return parser.parse_args()


def as_row(found: Outcome) -> list[str]:
    times = [f"{found.estimated_ms[g][layout]:.2f}" for g in GAUDIS for layout in ("ours", "flattened")]
    return [
        str(found.batch),
        str(found.context),
        str(found.drafts),
        str(found.blocks),
        f"{found.ours_bytes:,}",
        f"{found.ours_ratio:.2f}",
        f"{found.flattened_bytes:,}",
        f"{found.flattened_ratio:.2f}",
        "equal" if found.difference <= TOLERANCE else f"off by {found.difference:.1e}",
        *times,
    ]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    cases = [Case(*sizes) for sizes in product(options.batches, options.contexts, options.drafts)]
    with torch.inference_mode():
        found = [measure(case) for case in cases]
    header = "batch context k blocks ours,B ratio flat,B ratio outputs g2:ours,ms g2:flat,ms g3:ours,ms g3:flat,ms"
    common.log(f"Emulated Gaudi; bytes of KV read by one layer, {SMALL.num_kv_heads} KV heads of {SMALL.head_size}.")
    common.log(f"ms: estimate, attention of a step of Llama-3.1-8B ({NUM_LAYERS} layers); not measured on any card.")
    common.log(common.table(header.split(), [as_row(one) for one in found]))
    rows: list[dict[str, Any]] = [
        {**asdict(one), "ours_ratio": one.ours_ratio, "flattened_ratio": one.flattened_ratio} for one in found
    ]
    common.write_json(options.json, {"tolerance": TOLERANCE, "layers": NUM_LAYERS, "rows": rows})
    wrong = [one for one in found if (one.ours_ratio, one.flattened_ratio) != (1.0, one.drafts + 1.0)]
    wrong += [one for one in found if one.difference > TOLERANCE]
    if wrong:
        raise SystemExit(f"{len(wrong)} cases are not as expected, the first: {wrong[0]}")


if __name__ == "__main__":
    main()
