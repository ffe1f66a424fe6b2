"""Checks that compare attention over paged KV with float64 results from the host, and checks of KV writes.

Rows have different lengths and end before, at, and after block boundaries. Slots that do not belong to any row contain
such large values that a query that attends to them gets a clearly wrong result.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, Blocks, FlatBlocks, build_rectangle
from vllm_gaudi_spec.attention.operations import PLAIN
from vllm_gaudi_spec.config import E4M3_MAX
from vllm_gaudi_spec.quantization.fp8 import to_e4m3
from vllm_gaudi_spec.quantization.layers import KV_DTYPE, Fp8Cache, kv_range
from vllm_gaudi_spec.self_test.subject import Failed, NotChecked, Subject, random
from vllm_gaudi_spec.step_inputs import make_host_counts, make_host_lengths
from vllm_gaudi_spec.upstream.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
)

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.fp8 import Arithmetic

_HEADS, _KV_HEADS, _HEAD_SIZE = 8, 2, 128
_VERIFY_QUERIES = 4
# The lengths of long rows. The first ones are close to the length after which an NPU kernel skipped keys, although with
# different arguments (quirk A01). The last one is near the end of a block table.
_LONG = (511, 512, 513, 4095)
_WINDOW = 300
# The number of queries in a long prompt chunk, which follows as many keys. With some masks and lengths that were not
# published, fused attention on a Gaudi 3 corrupts all head groups except the first (quirk A31). Comparing every query
# would take too long.
_LONG_CHUNK = 1024
_COMPARED_EACH = 61
# The scales of FP8 KV in these checks. They are powers of two, so that e4m3 represents the keys exactly.
_KV_SCALE = torch.tensor(0.25)
_KV_SCALES_BY_HEAD = torch.tensor([[0.25], [0.5]])
# The smallest positive e4m3 value.
_SMALLEST = 2.0**-9
# The value in slots that must not be read. It is finite in every dtype, and sums of 128 products of it are finite in
# float32.
_HUGE = 3e4
# The tolerances for results of magnitude 1. Inputs are the same, but kernels round scores, weights, and results.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_decode(subject: Subject) -> str:
    """Check decode attention, with one query per row."""
    block = subject.backend.traits.block_size
    ends = [0, block - 2, block + 3, 2 * block - 1]
    decodes = _attend(subject, "decodes", ends, [1] * len(ends), 1, decode=True)
    return f"{decodes}, {_attend_long(subject, 'long decodes', 1)}"


def check_prompts(subject: Subject) -> str:
    """Check prompt chunks that begin and end inside blocks, with and without padding, and with a sliding window."""
    block, chunk = subject.backend.traits.block_size, subject.backend.traits.smallest_prefill
    num_rows = min(2, max(subject.backend.traits.prefill_rows))
    for starts, real in (([block + 3, 5], [chunk - 5, 9]), ([0, 4 * block], [chunk, 1]), ([0, 0], [9, chunk])):
        _attend(subject, "prompt chunks", starts[:num_rows], real[:num_rows], chunk, decode=False)
    # An NPU's compressed mask covers 2,048 queries and keys, regardless of the actual lengths.
    starts, real = [2048 + block - 1, _WINDOW][:num_rows], [chunk - 1, chunk][:num_rows]
    form = _attend(subject, "long prompt chunks", starts, real, chunk, decode=False)
    lengths = [start + count for start, count in zip(starts, real, strict=True)]
    rows = _Rows(subject, lengths, chunk, decode=False, window=_WINDOW)
    rows.hide([start - _WINDOW + 1 for start in starts])
    rows.check(f"prompt chunks under a window of {_WINDOW}", starts, real)
    # Together with the padding row, this is the minimum number of queries for FlashAttention on CUDA.
    rows = _Rows(subject, [2 * _LONG_CHUNK], _LONG_CHUNK, decode=False)
    rows.check(f"prompt chunks of {_LONG_CHUNK}", [_LONG_CHUNK], [_LONG_CHUNK], each=_COMPARED_EACH)
    return f"{form}, with a window and of {_LONG_CHUNK} positions too"


def check_verify(subject: Subject) -> str:
    """Check attention in verify steps, with several queries per row, some of which are padding."""
    block, queries = subject.backend.traits.block_size, _verify_queries(subject.backend)
    starts = [0, block - 2, block + 3, 2 * block - 1]
    real = [queries, 1, queries - 1, queries // 2]
    short = _attend(subject, f"verify steps of {queries} positions", starts, real, queries, decode=True)
    return f"{short}, {_attend_long(subject, f'long verify steps of {queries} positions', queries)}"


def check_replays(subject: Subject) -> str:
    """Check that replays of one graph give the same results as graphs that are captured separately for each step.

    Between replays, rows get longer or start again. On an NPU, this also checks the length bounds from the host.
    """
    block = subject.backend.traits.block_size
    for queries in (1, _verify_queries(subject.backend)):
        rows = _Rows(subject, [3 * block] * 2, queries, decode=True)
        rows.write(rows.keys_SKD, rows.values_SKD)
        steps = [5, block - 1], [block, 2 * block + 3], [3 * block - queries, 7], [0, 2 * block]
        replayed = [rows.attend(starts)[1] for starts in steps]
        for number, (starts, found_BQHD) in enumerate(zip(steps, replayed, strict=True)):
            rows.layer.forget_graphs()
            # Ignore the padding row.
            off = (found_BQHD - rows.attend(starts)[1])[:-1].abs().nan_to_num(nan=torch.inf).amax().item()
            if off > _TOLERANCE[subject.dtype]:
                raise Failed(
                    f"run {number + 1} of a graph of {queries} queries per row differs by up to {off:.3g} from a graph "
                    f"captured for this run ({_TOLERANCE[subject.dtype]:g} is allowed)"
                )
    return f"{len(steps)} runs of a graph, over 1 to 3 blocks per row"


def check_writes(subject: Subject) -> str:
    """Write KV for real positions and padding together, and then check each position separately.

    The key of each position is a unit vector that no other position in its row has, so a query with this vector returns
    the position's value. This check works with any cache layout and detects both wrong keys and wrong values.
    """
    layer = _Layer(subject, num_blocks=4, num_heads=_KV_HEADS)
    block, queries = layer.spec.block_size, _verify_queries(subject.backend)
    length = min(block, _HEAD_SIZE)
    keys_SKD = torch.zeros(length, _KV_HEADS, _HEAD_SIZE)
    keys_SKD[torch.arange(length), :, torch.arange(length)] = 30.0
    keys_RSKD = keys_SKD.expand(3, -1, -1, -1)
    values_RSKD = random((3, length, _KV_HEADS, _HEAD_SIZE), seed=3).sign()
    slots_RS = (torch.arange(1, 4) * block)[:, None] + torch.arange(length)
    layer.write(keys_RSKD.flatten(0, 1), values_RSKD.flatten(0, 1), slots_RS.flatten())

    # One row ends inside a block, one contains only padding and begins in a slot of the first row, and one ends at the
    # end of a block.
    starts, real = [5, 4 + queries, length - queries], [queries - 1, 0, queries]
    key, value = (torch.full((3, queries, _KV_HEADS, _HEAD_SIZE), _HUGE) for _ in range(2))
    for row, (start, count) in enumerate(zip(starts, real, strict=True)):
        values_RSKD[row, start : start + count] *= -1
        key[row, :count], value[row, :count] = (
            stored[row, start : start + count] for stored in (keys_RSKD, values_RSKD)
        )
    table = torch.arange(1, 4, dtype=torch.int32)[:, None]

    def self_test_step(starts_B: Any, num_real_B: Any, table_BW: Any, key_TKD: Any, value_TKD: Any) -> None:
        tokens = torch.zeros((3, queries), dtype=torch.int32, device=starts_B.device)
        slots_T = build_rectangle(
            tokens, starts_B, num_real_B, Blocks((table_BW,), (block,)), subject.backend.row_operations
        ).slots[0]
        layer.operations.write_kv(key_TKD, value_TKD, layer.kv_cache, slots_T, layer.spec)

    inputs = torch.tensor(starts, dtype=torch.int32), torch.tensor(real, dtype=torch.int32), table
    kv = (tensor.flatten(0, 1).to(subject.dtype) for tensor in (key, value))
    subject.backend.graphs.graph(self_test_step)(*map(subject.backend.memory.upload, (*inputs, *kv)))

    found_RSKD = layer.attend(keys_RSKD.flatten(0, 1), [0] * 3, length, table).unflatten(0, (3, length))
    wrong = (~((found_RSKD - values_RSKD).abs() <= 0.25)).flatten(2).any(-1).nonzero()  # also true for NaN
    if len(wrong):
        row, position = wrong[0].tolist()
        written = 0 <= position - starts[row] < real[row]
        what = "just written" if written else "written before, which the step was not to change,"
        raise Failed(
            f"{len(wrong)} of {3 * length} positions do not read as they were written; the first is position "
            f"{position} of row {row}, {what} in a step with padding"
        )
    return f"{3 * length} positions after a step with padding"


def check_fp8_kv(subject: Subject) -> str:
    """Check that FP8 KV stores each value as the nearest e4m3 value, or as the maximum if the value is out of range."""
    weights = subject.backend.weights
    if weights.fp8_arithmetic is None:
        raise NotChecked("this device keeps KV in the model's dtype")
    largest = E4M3_MAX[kv_range(weights.fp8_range)]
    arithmetic = weights.fp8_arithmetic(largest)
    for scale in (_KV_SCALE, _KV_SCALES_BY_HEAD):
        _check_kv_by(subject, scale, arithmetic, largest)
    return f"values up to the largest of {largest:g}, by scale {_KV_SCALE:g} and by head"


def _check_kv_by(subject: Subject, scale: torch.Tensor, arithmetic: Arithmetic, largest: float) -> None:
    layer = _Layer(subject, num_blocks=2, num_heads=_KV_HEADS, fp8=(arithmetic, scale))
    block = layer.spec.block_size
    length = min(block, _HEAD_SIZE)
    keys_SKD = torch.zeros(length, _KV_HEADS, _HEAD_SIZE)
    keys_SKD[torch.arange(length), :, torch.arange(length)] = 30.0
    sizes_S11 = torch.logspace(math.log10(_SMALLEST), math.log10(10 * largest), length)[:, None, None]
    values_SKD = (random(tuple(keys_SKD.shape), seed=4).sign() * sizes_S11 * scale).to(subject.dtype)
    layer.write(keys_SKD, values_SKD, block + torch.arange(length))
    expected_SKD = to_e4m3(values_SKD.float() / scale, largest).double() * scale
    table = torch.ones((1, 1), dtype=torch.int32)
    found = {"a chunk": layer.attend(keys_SKD, [0], length, table)}
    flat = None
    if subject.backend.traits.flat_decode:
        flat = torch.tensor([(1, row, 0) for row in range(length)], dtype=torch.int32).T.contiguous()
    found["decodes"] = layer.attend(keys_SKD, list(range(length)), 1, table.expand(length, 1).contiguous(), flat)
    for what, found_SKD in found.items():
        # Allow half of the smallest relative spacing between e4m3 values. A comparison with NaN is false.
        wrong = ~((found_SKD - expected_SKD).abs() <= expected_SKD.abs() / 32)
        if not wrong.any():
            continue
        position, head, _ = wrong.nonzero()[0].tolist()
        numbers = (
            float(part[position, head][wrong[position, head]][0]) for part in (values_SKD, found_SKD, expected_SKD)
        )
        raise Failed(
            "{:g} reads as {:g} and not as {:g}".format(*numbers)
            + f" in {what}, by scale {float(scale.expand(_KV_HEADS, 1)[head]):g}"
        )


def _verify_queries(backend: DeviceBackend) -> int:
    return min(_VERIFY_QUERIES, 1 + backend.traits.max_drafts)


class _Layer:
    def __init__(
        self,
        subject: Subject,
        num_blocks: int,
        num_heads: int = _HEADS,
        fp8: tuple[Arithmetic, torch.Tensor] | None = None,
        window: int | None = None,
    ) -> None:
        """Allocate a KV cache. `fp8` contains the arithmetic and the scale for FP8 KV, or is None for unquantized
        KV."""
        backend = self.backend = subject.backend
        operations: Any = PLAIN
        if fp8 is not None:
            (arithmetic, scale), device = fp8, backend.traits.torch_device
            k_cache, v_cache = (Fp8Cache(scale, arithmetic, subject.dtype).to(device) for _ in range(2))
            matmul = arithmetic.matmul
            operations = SimpleNamespace(
                k_cache=k_cache, v_cache=v_cache, matmul_qk=matmul, softmax=PLAIN.softmax, matmul_av=matmul
            )
        kv_spec = FullAttentionSpec(
            block_size=backend.traits.block_size,
            num_kv_heads=_KV_HEADS,
            head_size=_HEAD_SIZE,
            dtype=subject.dtype if fp8 is None else KV_DTYPE,
        )
        size = kv_spec.page_size_bytes * num_blocks
        name = "self-test"
        config = KVCacheConfig(
            num_blocks,
            [KVCacheTensor(size, [name], size, kv_spec.page_size_bytes)],
            [KVCacheGroupSpec([name], kv_spec)],
        )
        self.kv_cache = backend.memory.allocate_kv(config, KVCacheLayout.LBHNC)[name]
        self.spec = AttentionLayerSpec(
            num_heads=num_heads,
            num_kv_heads=_KV_HEADS,
            head_size=_HEAD_SIZE,
            scale=_HEAD_SIZE**-0.5,
            sliding_window=window,
            logits_soft_cap=0.0,
            dtype=subject.dtype,
            block_size=backend.traits.block_size,
            kv_dtype=None if fp8 is None else KV_DTYPE,
            operations=operations,
        )
        served = backend.attention.supports_attention(self.spec)
        self.operations: Any = backend.attention if served else torch_ops
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Discard the captured graphs, so that the next calls capture new ones."""

        def self_test_attend(
            starts_B: torch.Tensor,
            table_BW: torch.Tensor,
            flat: torch.Tensor | None,
            lengths_B: torch.Tensor | None,
            counts_B: torch.Tensor | None,
            query_THD: torch.Tensor,
            *fresh_kv: torch.Tensor,
        ) -> torch.Tensor:
            call = AttentionCall(
                num_rows=len(starts_B),
                num_queries=len(query_THD) // len(starts_B),
                starts_B=starts_B,
                block_table_BW=table_BW,
                flat=None if flat is None else FlatBlocks.unpack(flat),
                host_lengths_B=lengths_B,
                host_counts_B=counts_B,
                from_start=bool(fresh_kv),
                fresh_kv=fresh_kv,
            )
            attended: torch.Tensor = self.operations.attend(query_THD, self.kv_cache, call, self.spec)
            return attended

        self._attend = self.backend.graphs.graph(self_test_attend)

    def write(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write KV to slots, all of which must be different."""

        def self_test_write(key_TKD: torch.Tensor, value_TKD: torch.Tensor, slots_T: torch.Tensor) -> None:
            self.operations.write_kv(key_TKD, value_TKD, self.kv_cache, slots_T, self.spec)

        inputs = key_TKD.to(self.spec.dtype), value_TKD.to(self.spec.dtype), slots_T.long()
        self.backend.graphs.graph(self_test_write)(*map(self.backend.memory.upload, inputs))

    def attend(
        self,
        query_THD: torch.Tensor,
        starts: list[int],
        queries: int,
        table_BW: torch.Tensor,
        flat: torch.Tensor | None = None,
        counts: list[int] | None = None,
        fresh_kv: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """Compute attention on the device, and return the result on the host as float64.

        Args:
            counts: The number of real queries in each prompt chunk. The remaining queries are padding.
            fresh_kv: The keys and values of the queries, if the queries are first chunks of prompts.
        """
        memory = self.backend.memory
        # The host knows only upper bounds on the lengths of decodes, as in the engine.
        ends = [start + count for start, count in zip(starts, counts or [queries] * len(starts), strict=True)]
        lengths_B = counts_B = None
        if self.backend.traits.needs_host_lengths:
            lengths_B = make_host_lengths(len(starts), ends, table_BW.shape[1] * self.spec.block_size)
            counts_B = None if counts is None else make_host_counts(len(starts), counts)
        found = self._attend(
            memory.upload(torch.tensor(starts, dtype=torch.int32)),
            memory.upload(table_BW),
            None if flat is None else memory.upload(flat),
            lengths_B,
            counts_B,
            *(memory.upload(tensor.to(self.spec.dtype)) for tensor in (query_THD, *fresh_kv)),
        )
        return memory.download(found).double()


def _attend(subject: Subject, what: str, starts: list[int], real: list[int], queries: int, *, decode: bool) -> str:
    lengths = [start + count for start, count in zip(starts, real, strict=True)]
    rows = _Rows(subject, lengths, queries, decode=decode)
    rows.check(what, starts, real)
    return f"{what} over {rows.form}"


def _attend_long(subject: Subject, what: str, queries: int) -> str:
    """Check long rows that share the blocks of a prefix, and long rows with a sliding window."""
    starts, real = [length - queries for length in _LONG], [queries] * len(_LONG)
    rows = _Rows(subject, list(_LONG), queries, decode=True, shares_prefix=True, group=2)
    rows.check(f"{what} with a shared prefix", starts, real)
    rows = _Rows(subject, list(_LONG), queries, decode=True, window=_WINDOW, group=8)
    rows.hide([start - _WINDOW + 1 for start in starts])
    rows.check(f"{what} under a window of {_WINDOW}", starts, real)
    if subject.backend.traits.flat_decode:
        rows = _Rows(subject, list(_LONG), queries, decode=True, group=0)
        rows.check(f"{what} with blocks read in place", starts, real)
    return f"{what} over up to {max(_LONG)} keys, with a shared prefix and with a window"


class _Rows:
    """Rows with given lengths, followed by a padding row. All other slots contain huge values."""

    def __init__(
        self,
        subject: Subject,
        lengths: list[int],
        queries: int,
        *,
        decode: bool,
        shares_prefix: bool = False,
        window: int | None = None,
        group: int = 1,
    ) -> None:
        """Allocate the rows and generate random KV for them.

        Args:
            group: The number of blocks in each entry of a flat block list, or 0 to read blocks in place.
        """
        traits = subject.backend.traits
        block = traits.block_size
        self._subject, self._queries, self._window, self._decode = subject, queries, window, decode
        rows = len(lengths) + 1
        num_shared = min(lengths) // block if shares_prefix else 0
        self._table_BW = torch.zeros(rows, -(-(max(lengths) + queries) // block), dtype=torch.int32)
        num_blocks = 1
        for row, length in enumerate(lengths):
            for index in range(-(-length // block)):
                is_shared = row > 0 and index < num_shared
                self._table_BW[row, index] = self._table_BW[0, index] if is_shared else num_blocks
                num_blocks += not is_shared
        self.layer = _Layer(subject, num_blocks, window=window)
        self._flat = None
        if decode and traits.flat_decode and not group:
            self._flat = torch.tensor([[rows], [0]], dtype=torch.int32).repeat(1, num_blocks)
            for row, length in enumerate(lengths):
                for index in range(-(-length // block)):
                    self._flat[:, self._table_BW[row, index]] = torch.tensor([row, index])
        elif decode and traits.flat_decode:
            # The entries are in random order, with padding at the end.
            entries = []
            for row, length in enumerate(lengths):
                blocks = [*self._table_BW[row].tolist(), *[0] * (group - 1)]
                firsts = range(0, -(-length // block), group)
                entries += [(*blocks[index : index + group], row, index) for index in firsts]
            listed = torch.tensor(entries[::-1] + [(*[0] * group, rows, 0)] * 3, dtype=torch.int32)
            self._flat = torch.cat((listed[:, :group].flatten(), *listed[:, group:].unbind(1))).view(group + 2, -1)
        self._huge_SKD, self._huge_values_SKD = (
            random((num_blocks * block, _KV_HEADS, _HEAD_SIZE), seed, subject.dtype).sign() * _HUGE for seed in (1, 2)
        )
        self.keys_SKD, self.values_SKD = self._huge_SKD.clone(), self._huge_values_SKD.clone()
        self._slots = [
            torch.cat([entry * block + torch.arange(block) for entry in self._table_BW[row].tolist()])[:length]
            for row, length in enumerate(lengths)
        ]
        for row, slots_L in enumerate(self._slots):
            for stored, seed in ((self.keys_SKD, 10), (self.values_SKD, 20)):
                stored[slots_L] = random((len(slots_L), _KV_HEADS, _HEAD_SIZE), seed + row, subject.dtype)

    @property
    def form(self) -> str:
        return f"{'tables' if self._flat is None else 'lists'} of blocks"

    def hide(self, counts: list[int]) -> None:
        """Replace the first `counts` keys of each row with huge values, because no query may attend to them any
        more."""
        for slots_L, count in zip(self._slots, counts, strict=True):
            hidden = slots_L[: max(count, 0)]
            self.keys_SKD[hidden], self.values_SKD[hidden] = self._huge_SKD[hidden], self._huge_values_SKD[hidden]

    def write(self, keys_SKD: torch.Tensor, values_SKD: torch.Tensor) -> None:
        self.layer.write(keys_SKD, values_SKD, torch.arange(len(keys_SKD)))

    def attend(self, starts: list[int], real: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries and their attention results, including those for padding.

        Args:
            real: The number of real queries in each prompt chunk.
        """
        rows, queries = len(starts) + 1, self._queries
        query_BQHD = random((rows, queries, _HEADS, _HEAD_SIZE), 30, self._subject.dtype)
        counts = None if self._decode or real is None else [*real, 0]
        fresh_kv: tuple[torch.Tensor, ...] = ()
        if counts and not any(starts):
            slots_BQ = pad_sequence([*self._slots, torch.zeros(queries, dtype=torch.int64)], batch_first=True)
            fresh_kv = tuple(stored_SKD[slots_BQ.flatten()] for stored_SKD in (self.keys_SKD, self.values_SKD))
        inputs = [*starts, 0], queries, self._table_BW, self._flat, counts, fresh_kv
        found = self.layer.attend(query_BQHD.flatten(0, 1), *inputs)
        return query_BQHD, found.unflatten(0, (rows, queries))

    def check(self, what: str, starts: list[int], real: list[int], each: int = 1) -> None:
        """Check the results for rows with `real` queries after `starts` tokens. Later slots in the rows get huge
        values.

        Args:
            each: The interval of the queries that are compared, or 1 to compare all of them.
        """
        keys_SKD, values_SKD = self.keys_SKD.clone(), self.values_SKD.clone()
        for slots_L, start, count in zip(self._slots, starts, real, strict=True):
            later = slots_L[start + count :]
            keys_SKD[later], values_SKD[later] = self._huge_SKD[later], self._huge_values_SKD[later]
        self.write(keys_SKD, values_SKD)
        query_BQHD, found_BQHD = self.attend(starts, real)
        dtype = self._subject.dtype
        for row, (start, count) in enumerate(zip(starts, real, strict=True)):
            slots_L = self._slots[row][: start + count]
            kv = keys_SKD[slots_L], values_SKD[slots_L]
            compared_Q = torch.arange(0, count, each)
            expected_QHD = _exact(query_BQHD[row, compared_Q], *kv, start + compared_Q, self._window)
            off = (found_BQHD[row, compared_Q] - expected_QHD).abs().nan_to_num(nan=torch.inf).amax().item()
            if off > _TOLERANCE[dtype]:
                raise Failed(
                    f"{what} differ by up to {off:.3g} from float64 in a row with {start} tokens before them "
                    f"({_TOLERANCE[dtype]:g} is allowed)"
                )


def _exact(
    query_QHD: torch.Tensor,
    keys_LKD: torch.Tensor,
    values_LKD: torch.Tensor,
    positions_Q: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Return the exact result for a row with L keys, float64 [Q, H, D]. Attention is causal within the sliding
    window."""
    group = _HEADS // _KV_HEADS
    keys_LHD, values_LHD = (tensor.double().repeat_interleave(group, 1) for tensor in (keys_LKD, values_LKD))
    scores = torch.einsum("qhd,lhd->hql", query_QHD.double(), keys_LHD) * _HEAD_SIZE**-0.5
    positions_Q1, positions_L = positions_Q[:, None], torch.arange(len(keys_LKD))
    scores.masked_fill_(positions_L > positions_Q1, -torch.inf)
    if window is not None:
        scores.masked_fill_(positions_L <= positions_Q1 - window, -torch.inf)
    return torch.einsum("hql,lhd->qhd", scores.softmax(-1), values_LHD)
