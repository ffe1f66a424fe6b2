"""Code of the existing Gaudi plugin on the emulated Gaudi: does the emulator count what is known of it?

git clone https://github.com/vllm-project/vllm-gaudi && git -C vllm-gaudi checkout 091bbadd
python benchmarks/gaudi_outside.py --checkout ../vllm-gaudi --json .bench/gaudi_outside.json

Two things are known from reading it: its acceptance of drafts copies four tensors to the host each step, and its verify
rows list a request's blocks once for each of k + 1 rows. Its functions are imported from the checkout and run as they
are; names that this environment's packages lack are filled with empty classes, which the output lists. Nothing here ran
on a Gaudi.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Read by vLLM and by the checkout when they are imported: the emulated device; block lists instead of a slice of the
# cache, as the checkout's own tests of speculation have it; a version of the bridge, which no package reports here.
os.environ["VGS_DEVICE"] = "hpu-emulated"
os.environ["VLLM_CONTIGUOUS_PA"] = "false"
os.environ["VLLM_BUILD"] = "1.23.0"

import common
import gaudi_graphs as graphs
import gaudi_layout as layout  # installs the emulator, as gaudi_graphs does
import numpy as np
import torch

from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec
from vllm_gaudi_spec.config import EXPONENTIAL
from vllm_gaudi_spec.devices.hpu.backend import TRAITS, KVPair, make_backend
from vllm_gaudi_spec.emulator.card import DEVICE, DeviceRefusal
from vllm_gaudi_spec.emulator.counters import Tally
from vllm_gaudi_spec.sampling.rules import strict
from vllm_gaudi_spec.tools.io.command_line import Parser

RUNNER = "vllm_gaudi.v1.worker.hpu_model_runner"
SAMPLER = "vllm_gaudi.v1.sample.hpu_rejection_sampler"
VOCAB = 512
# Of the server whose buckets are used.
MAX_NUM_SEQS, MAX_MODEL_LEN = 64, 4096


# ---- their modules -------------------------------------------------------------------------------------


class Outside:
    """Modules of the checkout."""

    def __init__(self, checkout: Path) -> None:
        if not (checkout / "vllm_gaudi").is_dir():
            raise SystemExit(f"{checkout} holds no folder vllm_gaudi")
        sys.path.insert(0, str(checkout))
        self.filled: list[str] = []
        """Names that were missing elsewhere, and are empty classes now. Nothing that runs here uses them."""
        self.sampler = self._load(SAMPLER)
        self.runner = self._load(RUNNER)
        self.utils = self._load("vllm_gaudi.extension.utils")
        self.paged = self._load("vllm_gaudi.attention.ops.hpu_paged_attn")
        self.buckets = self._load("vllm_gaudi.extension.bucketing.common")
        self.settings = self._load("vllm_gaudi.extension.runtime")

    def configure(self, fused: bool) -> None:
        """Their settings, anew from the environment."""
        os.environ["VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT"] = str(fused)
        self.settings.clear_config()

    def _load(self, name: str) -> Any:
        while True:
            try:
                return importlib.import_module(name)
            except ImportError as error:
                # It follows vLLM's main branch, which has names that a release has not.
                found = re.search(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
                if found is None or found[2] not in sys.modules or hasattr(sys.modules[found[2]], found[1]):
                    raise
                setattr(sys.modules[found[2]], found[1], type(found[1], (), {}))
                self.filled.append(f"{found[2]}.{found[1]}")


# ---- acceptance of drafts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    batch: int
    drafts: int
    who: str
    host_reads: int
    lines: list[str]
    """Where the reads came from."""
    markers: int
    launches: int
    equal: bool
    """The tokens are those of the other one."""


def acceptance_inputs(batch: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, K + 1, V], and drafts [B, K] of which each row's first few are right: 0, 1, ... of them."""
    noise = torch.Generator().manual_seed(k)
    logits = torch.randn(batch, k + 1, VOCAB, generator=noise)
    best = logits.argmax(-1)[:, :k]
    right = torch.arange(k) < (torch.arange(batch) % (k + 1))[:, None]
    return logits, torch.where(right, best, (best + 1) % VOCAB).int()


def counted(step: Callable[[], Any]) -> tuple[Any, Tally, list[str]]:
    """The second of two equal steps: what was to compile is compiled."""
    step()
    DEVICE.mark_step()
    DEVICE.next_step()
    before = DEVICE.counters.events.copy()
    result = step()
    DEVICE.mark_step()
    new = DEVICE.counters.events - before
    return result, DEVICE.next_step(), [event.where for event in new.elements() if event.kind == "device-to-host sync"]


def accept_theirs(outside: Outside, logits: torch.Tensor, drafts: torch.Tensor) -> tuple[list[list[int]], Any, Any]:
    batch, k = drafts.shape
    on_device = logits.to("hpu")
    flat_drafts = drafts.flatten().to("hpu")
    ends = (torch.arange(1, batch + 1, dtype=torch.int32) * k).to("hpu")
    targets, bonus = on_device[:, :k].flatten(0, 1).contiguous(), on_device[:, k].argmax(-1)[:, None]

    def step() -> torch.Tensor:
        return outside.sampler.rejection_sample(
            draft_token_ids=flat_drafts,
            num_draft_tokens=[k] * batch,
            max_spec_len=k,
            cu_num_draft_tokens=ends,
            draft_probs=None,
            target_probs=targets,
            bonus_token_ids=bonus,
            sampling_metadata=SimpleNamespace(all_greedy=True),
        )

    tokens, tally, lines = counted(step)
    return [[token for token in row if token >= 0] for row in tokens.tolist()], tally, lines


def accept_ours(logits: torch.Tensor, drafts: torch.Tensor) -> tuple[list[list[int]], Any, Any]:
    """In one captured graph; all that leaves the device is the report."""
    backend = make_backend()

    def accept(logits_BQV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> torch.Tensor:
        verification = strict.verify(strict.sample_greedy(logits_BQV), drafts_BK, num_drafts_B)
        return torch.cat((verification.tokens_BQ, verification.num_sampled_B[:, None]), dim=1)

    program = backend.graphs.graph(accept)
    num_drafts = torch.full((drafts.shape[0],), drafts.shape[1], dtype=torch.int32)
    inputs = [tensor.to("hpu") for tensor in (logits, drafts, num_drafts)]
    report, tally, lines = counted(lambda: backend.memory.start_download(program(*inputs))())
    return [row[: row[-1]] for row in report.tolist()], tally, lines


def compare_acceptance(outside: Outside, batch: int, k: int) -> list[Acceptance]:
    logits, drafts = acceptance_inputs(batch, k)
    answers = {"theirs": accept_theirs(outside, logits, drafts), "ours": accept_ours(logits, drafts)}
    equal = answers["theirs"][0] == answers["ours"][0]
    return [
        Acceptance(batch, k, who, tally.host_reads, lines, tally.implicit_markers, tally.launches, equal)
        for who, (_, tally, lines) in answers.items()
    ]


# ---- attention of verify rows --------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    batch: int
    context: int
    drafts: int
    bucketed: bool
    fused: bool
    """With their kernel block_softmax_adjustment, which they use on Gaudi 3, instead of torch operations."""
    blocks: int
    """That the requests have."""
    their_list: int
    """Entries of their list of blocks, padding included,"""
    our_list: int
    """and of ours."""
    their_bytes: int
    our_bytes: int
    difference: float | None = None
    """The largest between the two outputs."""
    refusal: str | None = None
    """The emulator's error instead of running theirs."""

    @property
    def ratio(self) -> float:
        return self.their_bytes / self.our_bytes

    @property
    def crosses(self) -> bool:
        """Later tokens of the step stand in a block where its first does not: their list ends before it."""
        first, last = self.context - self.drafts - 1, self.context - 1
        return first // TRAITS.block_size != last // TRAITS.block_size

    @property
    def equal(self) -> bool:
        return self.difference is not None and self.difference <= layout.TOLERANCE


def stand_in(outside: Outside, rows: layout.Rows, case: layout.Case, spec: AttentionLayerSpec, buckets: bool) -> Any:
    """A model runner of theirs of which only what decode metadata needs was filled in."""
    manager = outside.buckets.HPUBucketingManager()
    blocks = rows.entries
    if buckets:
        manager.initialize(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_prefill_seqs=1,
            block_size=spec.block_size,
            max_num_batched_tokens=2048,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=case.drafts,
        )
        manager.num_hpu_blocks = MAX_NUM_SEQS * MAX_MODEL_LEN // spec.block_size
        manager.generate_decode_buckets()
    runner = outside.runner.HPUModelRunner.__new__(outside.runner.HPUModelRunner)
    starts = rows.starts_B[:, None] + torch.arange(case.queries, dtype=torch.int32)
    vars(runner).update(
        attn_block_size=spec.block_size,
        bucketing_manager=manager,
        get_dp_padding=partial(outside.runner.get_dp_padding, dp_size=1, dp_rank=0),
        positions_cpu=starts.flatten(),
        input_ids_cpu=torch.zeros(case.batch * case.queries, dtype=torch.int32),
        uses_mrope=False,
        pin_memory=False,
        device="hpu",
        interleaved_sliding_window=False,
        model_has_chunked_attention=False,
        num_mamba_like_layers=0,
        use_async_scheduling=False,
        use_contiguous_pa=False,
        defragmenter=None,
        model_config=SimpleNamespace(dtype=spec.dtype),
        _PAD_BLOCK_ID=blocks + 1,
    )
    return runner


def attend_theirs(
    outside: Outside, case: layout.Case, rows: layout.Rows, kv: KVPair, query: torch.Tensor, buckets: bool
) -> tuple[torch.Tensor, Tally, int]:
    """Output, counts, and how many blocks the metadata lists."""
    spec, module = layout.SMALL, outside.runner
    runner = stand_in(outside, rows, case, spec, buckets)
    data = runner._create_decode_input_data(
        case.batch, [case.queries] * case.batch, rows.starts_B.numpy().astype(np.int32), rows.table_BW
    )
    padded_rows = data.token_ids.shape[0]
    processor = module.HPUAttentionMetadataProcessor.__new__(module.HPUAttentionMetadataProcessor)
    processor.block_size = spec.block_size
    metadata = processor._set_block_mapping(
        module.trim_attn_metadata(data.attn_metadata), padded_rows, torch.device("hpu"), spec.dtype
    )
    wide = torch.zeros(padded_rows, 1, spec.num_heads * spec.head_size, dtype=spec.dtype)
    wide[: query.shape[0], 0] = query.flatten(1)
    on_device = wide.to("hpu")
    cache, matmul = outside.utils.VLLMKVCache(), outside.utils.Matmul()

    def step() -> torch.Tensor:
        return outside.paged.HPUPagedAttention.forward_decode(
            query=on_device,
            key_cache=kv.keys,
            value_cache=kv.values,
            block_list=metadata.block_list,
            block_mapping=metadata.block_mapping,
            block_bias=metadata.attn_bias,
            block_groups=metadata.block_groups,
            block_size=metadata.block_size,
            scale=spec.scale,
            matmul_qk_op=matmul,
            matmul_av_op=matmul,
            batch2block_matmul_op=matmul,
            block2batch_matmul_op=matmul,
            keys_fetch_func=cache.fetch_from_cache,
            values_fetch_func=cache.fetch_from_cache,
            position_bias=None,
            sinks=None,
            k_scales=None,
            v_scales=None,
        )

    out, tally, _ = counted(step)
    return out.cpu().view(-1, spec.num_heads, spec.head_size), tally, metadata.block_list.shape[0]


def compare_attention(outside: Outside, case: layout.Case, buckets: bool, fused: bool) -> Attention:
    spec = layout.SMALL
    outside.configure(fused)
    rows = layout.rectangle(case, spec)
    # Their pad block comes last, ours first: the cache has both.
    kv = layout.make_cache(rows.entries + 1, spec)
    shape = (case.batch * case.queries, spec.num_heads, spec.head_size)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    attend = layout.make_attend(make_backend(), spec, case.queries)
    our_rows = padded(rows, case) if buckets else rows
    ours, our_tally = layout.replayed(attend, kv, query.to("hpu"), our_rows)
    found = Attention(
        *(case.batch, case.context, case.drafts, buckets, fused, rows.entries),
        their_list=0,
        our_list=our_rows.entries,
        their_bytes=0,
        our_bytes=our_tally.kv_bytes_read,
    )
    try:
        theirs, tally, listed = attend_theirs(outside, case, rows, kv, query, buckets)
    except (DeviceRefusal, IndexError) as error:
        return replace(found, refusal=str(error).splitlines()[0])
    difference = float((theirs[: len(ours)] - ours).abs().max())
    return replace(found, their_list=listed, their_bytes=tally.kv_bytes_read, difference=difference)


def padded(rows: layout.Rows, case: layout.Case) -> layout.Rows:
    """With the list as long as our bucket for it. Padding is block 0, of the row after the last."""
    shapes = graphs.make_shapes(MAX_NUM_SEQS, MAX_MODEL_LEN, EXPONENTIAL, case.drafts, graphs.Settings())
    listed = torch.zeros(3, shapes.decode_context([case.context] * case.batch), dtype=torch.int32)
    listed[1] = case.batch
    listed[:, : rows.entries] = rows.listed_3N
    return replace(rows, listed_3N=listed)


# ---- output --------------------------------------------------------------------------------------------

RAN = (
    f"{SAMPLER}: rejection_sample, rejection_sample_pytorch",
    f"{RUNNER}: HPUModelRunner._create_decode_input_data, .get_habana_paged_attn_buffers, ._resolve_all_blocks *",
    f"{RUNNER}: HPUAttentionMetadataProcessor._set_block_mapping *, trim_attn_metadata, get_dp_padding",
    "vllm_gaudi.v1.attention.backends.hpu_attn: HPUAttentionMetadataV1.make_decode_metadata",
    "vllm_gaudi.attention.ops.hpu_paged_attn: HPUPagedAttention.forward_decode",
    "vllm_gaudi.extension.ops: flat_pa, pipelined_pa, grouped_max, batch2block, block2batch",
    "vllm_gaudi.extension.utils: VLLMKVCache.fetch_from_cache, Matmul",
    "vllm_gaudi.extension.bucketing.common: HPUBucketingManager.generate_decode_buckets, .find_decode_bucket",
)


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--checkout", type=Path, required=True, metavar="FOLDER", help="a checkout of vllm-project/vllm-gaudi"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="B", help="batch sizes")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128, 130, 1024], metavar="N", help="tokens of KV per request"
    )
    common.add_num_drafts(parser, "drafts", [1, 3])
    common.add_json(parser)
    return parser.parse_args()


def acceptance_row(one: Acceptance) -> list[str]:
    sizes = (one.batch, one.drafts, one.who, one.host_reads, one.markers, one.launches)
    return [*map(str, sizes), "equal" if one.equal else "differ"]


def attention_row(one: Attention) -> list[str]:
    form = ("on" if one.bucketed else "off", "fused" if one.fused else "torch")
    row = [*map(str, (one.batch, one.context, one.drafts, *form, one.blocks))]
    if one.refusal:
        return [*row, "-", str(one.our_list), "-", f"{one.our_bytes:,}", "-", "refused"]
    outputs = "equal" if one.equal else f"off by {one.difference:.2f}"
    lists = (str(one.their_list), str(one.our_list))
    return [*row, *lists, f"{one.their_bytes:,}", f"{one.our_bytes:,}", f"{one.ratio:.2f}", outputs]


def check(accepted: list[Acceptance], attended: list[Attention]) -> None:
    """What is known must be what was counted."""
    wrong: list[Any] = [one for one in accepted if one.host_reads != {"theirs": 4, "ours": 1}[one.who] or not one.equal]
    exact = [one for one in attended if not one.bucketed]
    wrong += [one for one in exact if not one.crosses and (one.ratio != one.drafts + 1 or not one.equal)]
    wrong += [one for one in exact if one.crosses and one.equal]
    if wrong:
        raise SystemExit(f"{len(wrong)} lines are not as expected, the first: {wrong[0]}")


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    outside = Outside(options.checkout.resolve())
    sizes = [(batch, k) for batch in options.batches for k in options.drafts]
    cases = [layout.Case(batch, context, k) for batch, k in sizes for context in options.contexts]
    with torch.inference_mode():
        accepted = [one for batch, k in sizes for one in compare_acceptance(outside, batch, k)]
        forms = ((False, False), (True, False), (True, True))
        attended = [compare_attention(outside, case, *form) for form in forms for case in cases]
    common.log("Ran unmodified, from the checkout:")
    for line in RAN:
        common.log(f"  {line}")
    common.log("* on instances made without __init__, whose attributes are filled in by hand")
    common.log(f"Names filled with empty classes, used by none of these: {', '.join(outside.filled) or 'none'}\n")
    common.log("Acceptance of drafts, one step:")
    header = ["batch", "k", "who", "device-to-host syncs", "implicit markers", "launches", "tokens"]
    common.log(common.table(header, [acceptance_row(one) for one in accepted]))
    for line in dict.fromkeys(line for one in accepted for line in one.lines):
        common.log(f"  read at {line}")
    common.log("\nAttention of verify rows, one layer, one step. Without buckets, lists are as long as needed:")
    header = [
        "batch",
        "context",
        "k",
        "buckets",
        "rescaling",
        "blocks",
        "their list",
        "our list",
        "theirs,B",
        "ours,B",
        "ratio",
        "outputs",
    ]
    common.log(common.table(header, [attention_row(one) for one in attended]))
    for text in dict.fromkeys(one.refusal for one in attended if one.refusal):
        common.log(f"  refused: {text}")
    common.log("Off: a step that crosses into a new block, which their list of blocks lacks (known from reading it).")
    report = {
        "ran": RAN,
        "filled": outside.filled,
        "acceptance": [asdict(one) for one in accepted],
        "attention": [{**asdict(one), "ratio": one.ratio} for one in attended],
    }
    common.write_json(options.json, report)
    check(accepted, attended)


if __name__ == "__main__":
    main()
