"""Compiled mode of the emulated Gaudi: how much it compiles, and the same regions by inductor on the CPU.

    python benchmarks/gaudi_compiled.py count --json .bench/gaudi_compiled_count.json
    python benchmarks/gaudi_compiled.py inductor --json .bench/gaudi_compiled_inductor.json

`count` starts engines in both modes and lets them warm up: what is compiled, for models of Llama's form with more and
fewer layers, and with more and fewer drafts. Widths are small, since no count depends on them; the number of requests
and their length are those of Llama 3.1 8B at 128 x 8192. In lazy mode, captured graphs that have equal parts between
their markers share those recipes, as a Gaudi's cache of recipes has it. In compiled mode equal regions count once; they
are not compiled here, which would take most of the time.

`inductor` puts torch's own compiler where the bridge's would be. A tiny model with random weights and n-gram drafts
answers two prompts; each region runs on plain CPU tensors, compiled by inductor or operation by operation ("eager"), in
turns. Tokens have to be equal; the speed says whether regions can be compiled into something faster, and nothing about
a Gaudi.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_gaudi_spec.tools.io.command_line import Parser

THIS = Path(__file__).resolve()
MODES = {"lazy": "1", "compiled": "0"}
SIZE = (128, 8192)
# Layers and drafts: one differs from the next.
COUNTED = ((2, 0), (2, 1), (2, 3), (2, 5), (32, 3))
NARROW = dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=1, head_dim=8, intermediate_size=64, vocab_size=512
)
BLOCKS = 4096
"""Of KV: what 94 GiB without 8B weights have in bfloat16."""
EXECUTORS = ("eager", "inductor")
PROMPTS = ([5, 6, 7, 8, 5, 6, 7], [11, 12, 13, 14, 15])
# Each size is a few regions, and each of those a compilation by g++.
BUCKETS = {"batch_buckets": [len(PROMPTS)], "prefill_buckets": [128], "block_buckets": [4]}


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, text in (("count", "what is compiled"), ("inductor", "regions by inductor")):
        part = parts.add_parser(name, help=text)
        common.add_json(part)
    parts.choices["inductor"].add_argument(
        "--rounds", type=int, default=3, metavar="N", help="times that each case is run"
    )
    for name in ("count-one", "inductor-one"):
        part = parts.add_parser(name)
        part.add_argument("case", nargs="+")
        part.add_argument("--result", type=Path, help=argparse.SUPPRESS)
        part.add_argument("--started", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_case(part: str, case: Sequence[str], mode: str, seconds: float) -> Any:
    environment = {
        **common.QUIET,
        **common.PLATFORMS["ours"],
        "VGS_DEVICE": "hpu-emulated",
        "VGS_SELF_TEST": "0",
        "PT_HPU_LAZY_MODE": MODES[mode],
    }
    return common.run_part(
        THIS, [part, *case], log_name=f"{part}_{'_'.join(case)}", environment=environment, seconds=seconds
    )


# ---- what is compiled ----------------------------------------------------------------------------------


def count(options: argparse.Namespace) -> None:
    rows = []
    for layers, k in COUNTED:
        row: dict[str, Any] = {"layers": layers, "k": k}
        for mode in MODES:
            row[mode] = run_case("count-one", (mode, str(layers), str(k)), mode, 7200)
        rows.append(row)
        common.log(f"{layers} layers, k = {k}: {row}")
    header = ["layers", "k", "lazy: graphs", "recipes", "min", "compiled: functions", "regions", "min"]
    lines = [
        [
            str(row["layers"]),
            str(row["k"] or "none"),
            *(
                f"{row[mode][name]:.{digits}f}"
                for mode in MODES
                for name, digits in (("graphs", 0), ("compiled", 0), ("minutes", 1))
            ),
        ]
        for row in rows
    ]
    common.log(f"\n{SIZE[0]} x {SIZE[1]}, {BLOCKS} blocks of KV, n-gram drafts. Minutes: start of the emulation.")
    common.log(common.table(header, lines))
    common.write_json(options.json, {"size": SIZE, "blocks": BLOCKS, "rows": rows})


def count_one(mode: str, layers: str, k: str) -> dict[str, float]:
    import dummy
    import speculation_common as shared

    from vllm_gaudi_spec.devices.hpu import compiled

    dummy.keep_engine_here()
    compiled._compile = on_host
    num_seqs, length = SIZE
    speculation = {"method": "ngram", "num_speculative_tokens": int(k), "prompt_lookup_max": 3} if int(k) else None
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = dummy.write_model(Path(folder), "tiny", **NARROW, num_hidden_layers=int(layers))
        with shared.engine(
            model,
            speculation,
            load_format="dummy",
            dtype=torch.bfloat16,
            max_model_len=length,
            max_num_seqs=num_seqs,
            num_gpu_blocks_override=BLOCKS,
        ) as llm:
            return {**_compiled(dummy.runner_of(llm)), "minutes": (time.perf_counter() - started) / 60}


def _compiled(runner: Any) -> dict[str, float]:
    from vllm_gaudi_spec.emulator.card import DEVICE

    counts = runner.backend.graphs.counts()
    if DEVICE.lazy:
        return {"graphs": len(DEVICE.graphs), "compiled": len(DEVICE.graph_recipes)}
    return {"graphs": sum(counts["captured"].values()), "compiled": counts["regions"]}


# ---- by inductor ---------------------------------------------------------------------------------------


def inductor(options: argparse.Namespace) -> None:
    found: dict[str, list[Any]] = {name: [] for name in EXECUTORS}
    for _ in range(options.rounds):
        for name in EXECUTORS:
            found[name].append(run_case("inductor-one", (name,), "compiled", 3600))
    answers = {str(one["tokens"]) for runs in found.values() for one in runs}
    seconds = {name: median(one["seconds"] for one in runs) for name, runs in found.items()}
    common.log(
        common.table(
            ["regions run", "warm-up s", "decode s", "regions"],
            [
                [name, f"{median(one['start'] for one in runs):.0f}", f"{seconds[name]:.3f}", str(runs[0]["regions"])]
                for name, runs in found.items()
            ],
        )
    )
    common.log(f"tokens {'equal' if len(answers) == 1 else 'DIFFER'}")
    common.log(f"eager / inductor: {seconds['eager'] / seconds['inductor']:.2f}")
    common.log(common.NOISE_NOTE)
    common.write_json(options.json, {"runs": found, "machine": common.describe_machine()})
    if len(answers) != 1:
        raise SystemExit("the answers differ")


def inductor_one(name: str) -> dict[str, Any]:
    import dummy

    from vllm_gaudi_spec.devices.hpu import compiled

    compiled._compile = {"eager": on_host, "inductor": by_inductor}[name]
    started = time.perf_counter()
    with dummy.engine(
        "tiny",
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        max_model_len=256,
        max_num_seqs=len(PROMPTS),
        gaudi_spec=BUCKETS,
    ) as llm:
        start = time.perf_counter() - started
        answer(llm)
        begin = time.perf_counter()
        tokens = answer(llm)
        seconds = time.perf_counter() - begin
        regions = dummy.runner_of(llm).backend.graphs.counts()["regions"]
    return {"tokens": tokens, "seconds": seconds, "start": start, "regions": regions}


def answer(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


def on_host(module: fx.GraphModule, examples: list[torch.Tensor]) -> Any:
    """The region on the emulated card's values, which lie on the host."""
    host = to_host(module)
    return as_region(host, host, host_examples(examples))


def by_inductor(module: fx.GraphModule, examples: list[torch.Tensor]) -> Any:
    from torch._dynamo import lookup_backend

    host, inputs = to_host(module), host_examples(examples)
    return as_region(lookup_backend("inductor")(host, inputs), host, inputs)


def to_host(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _host_device)
    module.recompile()
    return module


def _host_device(item: Any) -> Any:
    return torch.device("cpu") if isinstance(item, torch.device) else item


def host_examples(examples: list[torch.Tensor]) -> list[torch.Tensor]:
    """Without values, on the host, sharing memory as they do."""
    storages: dict[int, torch.Tensor] = {}
    made = []
    with FakeTensorMode(static_shapes=True):
        for one in examples:
            storage = one.untyped_storage()
            base = storages.setdefault(storage._cdata, torch.empty(storage.nbytes(), dtype=torch.uint8))
            typed = base[: base.numel() // one.element_size() * one.element_size()].view(one.dtype)
            made.append(typed.as_strided(one.shape, one.stride(), one.storage_offset()))
    return made


def as_region(run: Any, module: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """`run` for tensors of the emulated card. While it only compiles, nothing is computed."""
    from vllm_gaudi_spec.emulator.card import DEVICE
    from vllm_gaudi_spec.emulator.tensor import DeviceTensor, real

    with inputs[0].fake_mode if inputs else FakeTensorMode():
        outputs = [(one.shape, one.stride(), one.dtype) for one in module(*inputs)]

    def region(*tensors: Any) -> list[Any]:
        if DEVICE.compile_only:
            return [
                DeviceTensor(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
                for shape, stride, dtype in outputs
            ]
        return [DeviceTensor(tensor) for tensor in run(*[real(tensor) for tensor in tensors])]

    return region


def main() -> None:
    options = parse_options()
    if options.part == "count":
        count(options)
    elif options.part == "inductor":
        inductor(options)
    else:
        one = count_one if options.part == "count-one" else inductor_one
        common.hand_back(options.result, one(*options.case))


if __name__ == "__main__":
    main()
