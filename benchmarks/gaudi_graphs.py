"""How many graphs a configuration needs on a Gaudi, from its shapes alone; and what the existing worker would warm up.

python benchmarks/gaudi_graphs.py --json .bench/gaudi_graphs.json
python benchmarks/gaudi_graphs.py --checkout ../vllm-gaudi    # with the existing worker's own bucket lists beside

The lists are those that warm-up goes through: no engine, no model, no device. Every size that an engine would be given
is a flag or a constant below. Times of warm-up are estimates of devices/hpu/compile_time.py from what vllm-gaudi's
documentation has for Gaudi 2; nothing here ran on a Gaudi.

Memory of a step is a formula, of what torch holds at once beside weights and KV: see `Model`. The profile run of the
emulated card counts 104.2 MB for a decode of which the formula says 103.1 (64 x 4 queries, 1024 blocks, 4 heads, 2 of
KV, 32 numbers, float32). What kernels need inside, FusedSDPA's above all, nobody knows without a card.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.attention.flat import SLICE

emulator.install(generation="gaudi2", lazy=True)  # the checkout imports habana_frameworks

import common  # noqa: E402

from vllm_gaudi_spec.config import EXPONENTIAL, LINEAR, Options, Speculation  # noqa: E402
from vllm_gaudi_spec.devices.base import Attention, DeviceBackend, Memory  # noqa: E402
from vllm_gaudi_spec.devices.hpu import compile_time  # noqa: E402
from vllm_gaudi_spec.devices.hpu.backend import TRAITS  # noqa: E402
from vllm_gaudi_spec.drafting.draft_model import DraftModelKVSync  # noqa: E402
from vllm_gaudi_spec.drafting.head import HeadKVSync  # noqa: E402
from vllm_gaudi_spec.drafting.kv_sync import DrafterKVSync  # noqa: E402
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting  # noqa: E402
from vllm_gaudi_spec.records import DECODE, PREFILL, SampleShape, Shape, WarmUpWork  # noqa: E402
from vllm_gaudi_spec.runner.sample_shapes import SampleShapes  # noqa: E402
from vllm_gaudi_spec.runner.shapes import Shapes  # noqa: E402
from vllm_gaudi_spec.sampling.params import Branch, Sampling  # noqa: E402
from vllm_gaudi_spec.sampling.verify import needs_rectangle  # noqa: E402
from vllm_gaudi_spec.tools.io.command_line import Parser  # noqa: E402

VOCAB = 128256
MAX_LOGPROBS = 20
MAX_BATCHED_TOKENS = 2048
SIZES = ((8, 1024), (64, 1024), (64, 4096), (128, 8192), (256, 8192), (256, 131072))
DRAFTS = (0, 1, 3, 5)
DAY_SIZES = ((128, 8192), (256, 8192), (256, 131072))
NOBODY: Any = None
"""Who is not asked for a list of signatures."""


def settings() -> Any:
    """The traits of the Gaudi backend without a device."""
    traits = replace(TRAITS, torch_device=torch.device("cpu"))
    return DeviceBackend(traits=traits, memory=Memory(), attention=Attention())


@dataclass(frozen=True)
class Graphs:
    max_num_seqs: int
    max_model_len: int
    strategy: str
    k: int
    decode_pairs: int
    """Of a batch bucket and a block bucket that can meet."""
    decode: int
    prompt: int
    finish: int
    report: int
    prompt_logprobs: int
    recipes: int
    """Different ones of all these, on one card,"""
    recipes_of_prompts: int
    """and those of prompt chunks."""
    finish_probs: int
    """Finishes where the rule reads the probabilities of drafts (`standard`, `block` with probabilistic drafts)."""
    draft_greedy: int = 0
    """The rounds of a draft model with greedy drafts, and the prompt chunks that it reads,"""
    draft_random: int = 0
    """and with probabilistic or coupled ones."""
    draft_head: int = 0
    """The same of a head with greedy drafts, and what it reads after each verification."""
    worker_decode: int | None = None
    """Decode buckets of the existing worker,"""
    worker_prompt: int | None = None
    """and its prompt buckets; a graph each. Its sampler is not counted."""

    @property
    def total(self) -> int:
        """With an n-gram or suffix drafter, or none."""
        return self.decode + self.prompt + self.finish + self.report + self.prompt_logprobs

    @property
    def forwards(self) -> int:
        """What the existing worker's lists are to be compared with."""
        return self.decode + self.prompt


# ---- ours ----------------------------------------------------------------------------------------------


def make_shapes(
    max_num_seqs: int, max_model_len: int, strategy: str, k: int, backend: Any, num_blocks: int | None = None
) -> Shapes:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=MAX_BATCHED_TOKENS),
        model_config=SimpleNamespace(max_model_len=max_model_len, is_moe=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    return Shapes.from_config(config, Options(bucket_strategy=strategy), backend, k, num_blocks=num_blocks)


def count(max_num_seqs: int, max_model_len: int, strategy: str, k: int) -> Graphs:
    """As warm-up's manifest makes it up, of an n-gram drafter; a draft model's own beside."""
    backend = settings()
    shapes = make_shapes(max_num_seqs, max_model_len, strategy, k, backend)
    sampling = sampling_of(backend, max_num_seqs)
    every = set(shapes.all())
    passes = sample_passes(shapes, sampling, max_num_seqs, keeps_probs=False)
    keeps_probs = k > 0
    of_probs = sampling_of(backend, max_num_seqs, keeps_probs=keeps_probs)
    passes_probs = sample_passes(shapes, of_probs, max_num_seqs, keeps_probs=keeps_probs)
    others = len(reports_of(passes)) + len(sampling.prompt_logprob_counts())
    recipes = compile_time.recipes_of(WarmUpWork(tuple(every), len(passes) + others, 0, 0, 1))
    model, head = (
        (lambda requests: DraftModelKVSync(NOBODY, requests, NOBODY, shapes, 1, k, NOBODY)),
        (
            lambda requests: HeadKVSync(
                head=NOBODY,
                hidden_states=requests.hidden_states,
                requests=requests,
                recorder=NOBODY,
                shapes=shapes,
                split=NOBODY,
                blocks=NOBODY,
                head_size=1,
                max_len=1,
            )
        ),
    )
    modes = ("greedy", "probabilistic", "coupled")
    draft_graphs = {mode: _drafts(shapes, sampling, passes, backend, k, mode, model) for mode in modes}
    assert draft_graphs["probabilistic"] == draft_graphs["coupled"]
    return Graphs(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        strategy=strategy,
        k=k,
        decode_pairs=len(shapes.decode_sizes()),
        decode=sum(shape.phase == DECODE for shape in every),
        prompt=sum(shape.phase == PREFILL for shape in every),
        finish=len(passes),
        report=len(reports_of(passes)),
        prompt_logprobs=len(sampling.prompt_logprob_counts()),
        recipes=recipes.total,
        recipes_of_prompts=recipes.prompts,
        finish_probs=len(passes_probs),
        draft_greedy=draft_graphs["greedy"],
        draft_random=draft_graphs["probabilistic"],
        draft_head=_drafts(shapes, sampling, passes, backend, k, "greedy", head),
    )


def sampling_of(backend: Any, max_num_seqs: int, *, keeps_probs: bool = False) -> Sampling:
    return Sampling(
        backend,
        max_rows=max_num_seqs,
        vocab_size=VOCAB,
        max_logprobs=MAX_LOGPROBS,
        logprobs_mode="raw_logprobs",
        by_rows=keeps_probs,
    )


def sample_passes(
    shapes: Shapes, sampling: Sampling, max_rows: int, *, keeps_probs: bool
) -> list[tuple[SampleShape, Branch]]:
    """As the model runner makes them."""
    drafting = "probabilistic" if keeps_probs else "greedy"
    speculation = Speculation(
        method="draft_model", num_drafts=1, rule="standard", drafting=drafting, drafter_max_len=shapes.max_len
    )
    rule = partial(needs_rectangle, speculation)
    found = SampleShapes(shapes, max_rows=max_rows, lists=True, needs_rectangle=rule).every(sampling.branches())
    passes = list(found)
    assert len({sampling.signature(*one) for one in passes}) == len(passes)
    return passes


def reports_of(passes: list[tuple[SampleShape, Branch]]) -> set[tuple[int, int, Branch]]:
    return {(shape.rows, shape.queries, branch.of_reports()) for shape, branch in passes}


def _drafts(
    shapes: Shapes,
    sampling: Sampling,
    passes: list[tuple[SampleShape, Branch]],
    backend: Any,
    k: int,
    mode: str,
    kv_sync: Callable[[Any], DrafterKVSync],
) -> int:
    """Signatures of a drafter on the device, of drafts on their way to the host, and a second report for each of the
    runner's."""
    if not k:
        return 0
    speculation = Speculation(
        method="draft_model", num_drafts=k, rule="standard", drafting=mode, drafter_max_len=shapes.max_len
    )
    requests: Any = SimpleNamespace(backend=backend, pad_row=0, hidden_states=SimpleNamespace(dtype=torch.float32))
    drafting = DeviceDrafting(
        proposer=NOBODY,
        split=NOBODY,
        requests=requests,
        recorder=NOBODY,
        shapes=shapes,
        speculation=speculation,
        draft_probs=NOBODY,
        guard=NOBODY,
        kv_sync=kv_sync(requests),
        coverage=None,
    )
    with_drafts = len(reports_of(passes)) + len({shape.rows for shape, _ in passes})
    return len({signature for job in drafting.jobs(sampling) for signature in job.signatures}) + with_drafts


# ---- time and memory of a model ------------------------------------------------------------------------

CARD_BYTES = int(94.62 * 2**30)
"""What a Gaudi 2's allocator offers: vllm-gaudi's documentation, warmup.md."""
UTILIZATION, RESERVE = 0.9, 0.1
"""The defaults: --gpu-memory-utilization, and the share of that which is kept for what graphs keep."""
FULL_COPIES = 11.3
"""Of a sampling pass's logits, held at once by a full branch: counted by the emulated card's profile run, 371.0 MB for
256 positions of 32000 tokens. A greedy one holds them once."""


@dataclass(frozen=True)
class Model:
    """In bfloat16, as one rank has it."""

    name: str
    ranks: int
    weights: float
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_size: int = 128

    @property
    def block_bytes(self) -> int:
        return 2 * self.layers * self._kv_bytes(TRAITS.block_size)

    def _kv_bytes(self, tokens: int) -> int:
        """Keys of a layer; as many are values."""
        return tokens * self.kv_heads * self.head_size * 2

    def decode_bytes(self, shape: Shape, slice_blocks: int = SLICE) -> int:
        """Keys and values of a slice, its scores in float32 four times (themselves, masked, their exponents, and
        those rescaled), the mask, and which block is whose in two dtypes."""
        blocks, size = min(shape.context, slice_blocks), TRAITS.block_size
        scores = blocks * size * self.heads * shape.queries * 4
        mask = shape.context * size * shape.queries * 4
        return 2 * self._kv_bytes(blocks * size) + 4 * scores + mask + shape.context * shape.rows * 6

    def prompt_bytes(self, shape: Shape) -> int:
        """Keys and values of the context, the mask as bool, float32 and bfloat16, and the MLP's three products."""
        mask = shape.tokens * shape.context * (1 + 4 + 2)
        return 2 * self._kv_bytes(shape.rows * shape.context) + mask + 3 * shape.tokens * self.intermediate * 2


def sampling_bytes(num_positions: int) -> int:
    return int(FULL_COPIES * num_positions * VOCAB * 4)


MODELS = (
    Model("Llama 3.1 8B", 1, 8.03e9 * 2, layers=32, heads=32, kv_heads=8, intermediate=14336),
    Model("Llama 3.1 70B, TP 8", 8, 70.55e9 * 2 / 8, layers=80, heads=8, kv_heads=1, intermediate=3584),
)


class Step(NamedTuple):
    """What a graph needs beside weights and KV, while it runs."""

    kind: str
    size: tuple[Any, ...]
    num_bytes: int


def too_large(steps: list[Step], left: int) -> list[str]:
    """Those that do not fit into the memory that is left for them."""
    return [
        f"{step.kind} {step.size}: {step.num_bytes / 2**30:.1f} GiB, and {left / 2**30:.1f} GiB are left"
        for step in steps
        if step.num_bytes > left
    ]


def first_day(model: Model, max_num_seqs: int, max_model_len: int, k: int) -> dict[str, Any]:
    """One Gaudi 2 of `model.ranks`: what warm-up makes, how long that may take, and the step that needs most."""
    backend = settings()
    free = int(CARD_BYTES - model.weights)
    reserve = int(free * UTILIZATION * RESERVE)
    room = int(free * UTILIZATION) - reserve
    # As the profile run has it: blocks as if no step needed anything.
    shapes = make_shapes(max_num_seqs, max_model_len, EXPONENTIAL, k, backend, room // model.block_bytes)
    sampling = sampling_of(backend, max_num_seqs)
    passes = sample_passes(shapes, sampling, max_num_seqs, keeps_probs=False)
    forwards = tuple(shapes.all())
    decodes = [shape for shape in forwards if shape.phase == DECODE]
    steps = [
        *(Step("decode", shape, model.decode_bytes(shape)) for shape in decodes),
        *(Step("prompt", shape, model.prompt_bytes(shape)) for shape in forwards if shape.phase == PREFILL),
        *(Step("sampling", shape, sampling_bytes(shape.positions)) for shape, _ in passes),
    ]
    largest = {kind: max(step.num_bytes for step in steps if step.kind == kind) for kind, _, _ in steps}
    kind = max(largest, key=lambda kind: largest[kind])
    kv_blocks = max((room - largest[kind]) // model.block_bytes, 0)
    left = free - kv_blocks * model.block_bytes - reserve
    wrong = too_large(steps, left)
    if kv_blocks * TRAITS.block_size < max_model_len:
        wrong.append(f"{kv_blocks} blocks of KV are less than a request of {max_model_len} tokens")
    others = len(reports_of(passes)) + len(sampling.prompt_logprob_counts())
    recipes = compile_time.recipes_of(
        WarmUpWork(forwards, len(passes) + others, len({shape for shape, _ in passes}), 0, model.ranks)
    )
    return {
        "model": model.name,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "k": k,
        "decode": len(decodes),
        "prompt": len(forwards) - len(decodes),
        "finish": len(passes),
        "others": others,
        "recipes": recipes.total,
        "minutes": {name: recipes.seconds(cached=cached) / 60 for name, cached in CACHES},
        "bytes": largest,
        "decode_bytes_at_once": max(model.decode_bytes(shape, shape.context) for shape in decodes),
        "largest": kind,
        "left_bytes": left,
        "kv_bytes": kv_blocks * model.block_bytes,
        "kv_blocks": kv_blocks,
        "wrong": wrong,
    }


def as_first_day_row(found: dict[str, Any]) -> list[str]:
    names = ("decode", "prompt", "finish", "others", "recipes")
    sizes = [found["decode_bytes_at_once"], *found["bytes"].values(), found["left_bytes"], found["kv_bytes"]]
    return [
        found["model"],
        f"{found['max_num_seqs']} x {found['max_model_len']}",
        str(found["k"] or "none"),
        *(str(found[name]) for name in names),
        f"{found['minutes']['cold']:.1f} / {found['minutes']['cached']:.1f}",
        *(f"{size / 2**30:.1f}" for size in sizes),
    ]


# ---- the existing worker -------------------------------------------------------------------------------


def worker_buckets(graphs: Graphs) -> Graphs:
    """The same configuration by `HPUBucketingManager` of the checkout, with as many blocks as can be needed."""
    os.environ["VLLM_BUCKETING_STRATEGY"] = {EXPONENTIAL: "exp", LINEAR: "lin"}[graphs.strategy]
    importlib.import_module("vllm_gaudi.extension.runtime").clear_config()
    manager = importlib.import_module("vllm_gaudi.extension.bucketing.common").HPUBucketingManager()
    manager.initialize(
        max_num_seqs=graphs.max_num_seqs,
        max_num_prefill_seqs=1,
        block_size=TRAITS.block_size,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=graphs.max_model_len,
        num_speculative_tokens=graphs.k,
    )
    manager.num_hpu_blocks = graphs.max_num_seqs * -(-graphs.max_model_len // TRAITS.block_size)
    manager.generate_prompt_buckets()
    manager.generate_decode_buckets()
    return replace(graphs, worker_decode=len(manager.decode_buckets), worker_prompt=len(manager.prompt_buckets))


def open_checkout(checkout: Path) -> None:
    if not (checkout / "vllm_gaudi").is_dir():
        raise SystemExit(f"{checkout} holds no folder vllm_gaudi")
    sys.path.insert(0, str(checkout.resolve()))
    # What it would else ask an installed package for; and block lists, as with speculation in its own tests.
    os.environ["VLLM_BUILD"] = "1.23.0"
    os.environ["VLLM_CONTIGUOUS_PA"] = "false"


# ---- output --------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--checkout",
        type=Path,
        metavar="FOLDER",
        help="a checkout of vllm-project/vllm-gaudi, to count its buckets too",
    )
    common.add_json(parser)
    return parser.parse_args()


CACHES = (("cold", False), ("cached", True))


def warmup_minutes(graphs: Graphs) -> dict[str, float]:
    recipes = compile_time.Recipes(graphs.recipes_of_prompts, graphs.recipes - graphs.recipes_of_prompts)
    return {name: recipes.seconds(cached=cached) / 60 for name, cached in CACHES}


def as_row(graphs: Graphs) -> list[str]:
    minutes = warmup_minutes(graphs)
    draft_graphs = (graphs.draft_greedy, graphs.draft_random, graphs.draft_head) if graphs.k else ("-", "-", "-")
    worker = [str(part) for part in (graphs.worker_decode, graphs.worker_prompt) if part is not None]
    return [
        f"{graphs.max_num_seqs} x {graphs.max_model_len}",
        graphs.strategy,
        str(graphs.k or "none"),
        *(str(part) for part in (graphs.decode_pairs, graphs.decode, graphs.prompt, graphs.finish, graphs.report)),
        *(str(part) for part in (graphs.prompt_logprobs, graphs.total, *draft_graphs, graphs.finish_probs)),
        str(graphs.recipes),
        f"{minutes['cold']:.0f} / {minutes['cached']:.0f}",
        *worker,
    ]


def check(found: list[Graphs]) -> None:
    """With drafts the number of forwards must not depend on how many."""
    alike: dict[tuple[int, int, str], set[tuple[int, ...]]] = {}
    for one in found:
        if one.k:
            key = one.max_num_seqs, one.max_model_len, one.strategy
            alike.setdefault(key, set()).add((one.decode, one.prompt))
    for key, numbers in alike.items():
        if len(numbers) != 1:
            raise SystemExit(f"{key}: the number of graphs depends on k: {sorted(numbers)}")


def main() -> None:
    options = parse_options()
    if options.checkout:
        open_checkout(options.checkout)
    every = product(SIZES, (EXPONENTIAL, LINEAR), DRAFTS)
    found = [count(*sizes, strategy, k) for sizes, strategy, k in every]
    if options.checkout:
        found = [worker_buckets(one) for one in found]
    common.log(f"Graphs by signature: requests x context, chunks of up to {MAX_BATCHED_TOKENS} tokens, {VOCAB} tokens.")
    common.log("Minutes: estimate of compiling `all`, without / with a recipe cache; not measured on any card.")
    header = ["size", "strategy", "k", "pairs", "decode", "prompt", "finish", "report", "scores", "all"]
    header += ["+greedy", "+random", "+head", "finish by probs", "recipes", "min"]
    if options.checkout:
        header += ["worker decode", "worker prompt"]
    common.log(common.table(header, [as_row(one) for one in found]))
    check(found)
    days = [first_day(model, *sizes, k) for model, sizes, k in product(MODELS, DAY_SIZES, (0, 3))]
    header = ["model", "size", "k", "decode", "prompt", "finish", "others", "recipes", "min"]
    header += ["decode, no slices, GiB", "decode GiB", "prompt GiB", "sampling GiB", "left GiB", "KV GiB"]
    common.log("\nOn Gaudi 2: different recipes, minutes without / with a recipe cache, memory of the largest steps.")
    common.log(common.table(header, [as_first_day_row(day) for day in days]))
    for day in days:
        if day["wrong"]:
            size = f"{day['max_num_seqs']} x {day['max_model_len']}"
            raise SystemExit(f"{day['model']}, {size}: {'; '.join(day['wrong'])}")
    rows = [
        {**asdict(one), "total": one.total, "forwards": one.forwards, "estimated_minutes": warmup_minutes(one)}
        for one in found
    ]
    common.write_json(
        options.json, {"vocab_size": VOCAB, "max_num_batched_tokens": MAX_BATCHED_TOKENS, "rows": rows, "days": days}
    )


if __name__ == "__main__":
    main()
