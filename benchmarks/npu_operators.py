"""Count the operators in a decode step on the emulated Ascend NPU, with and without drafts.

VGS_DEVICE=ascend-emulated python -m benchmarks npu_operators MODEL [--json FILE]

A single row decodes. The drafters are n-grams on the device and a draft model, which is the target itself. Operators
have CANN's names. Operators in a captured graph are launched by the graph, regardless of their number.
"""

import argparse
from collections import Counter
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

import card_emulator
from benchmarks.shared import common
from vllm_gaudi_spec import environment
from vllm_gaudi_spec.tools.io.command_line import Parser

NUM_DRAFTS = 3
PROMPT = [3 + index % 7 for index in range(40)]
STEPS_BEFORE = 6
"""Number of steps in a request after which all further steps are equal."""

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram_gpu": {"method": "ngram_gpu", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": NUM_DRAFTS},
}


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a folder with a model, a tiny one")
    common.add_json(parser)
    return parser.parse_args()


def trace_of_a_step(model: str, speculative_config: dict[str, Any] | None) -> dict[str, Any]:
    if speculative_config is not None and speculative_config["method"] == "draft_model":
        speculative_config = speculative_config | {"model": model}
    llm = LLM(
        model,
        dtype="float16",
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=16 << 20,
        speculative_config=speculative_config,
    )
    try:
        engine: Any = llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        engine.add_request("traced", TokensPrompt(prompt_token_ids=PROMPT), params)
        for _ in range(STEPS_BEFORE):
            engine.step()
        card = card_emulator.counted()
        before = card.counts()
        with card.tracing() as lines:
            engine.step()
        after = card.counts()
        reads = {
            "copies to the host": after.downloads - before.downloads,
            "device-to-host syncs besides": after.syncs - before.syncs,
        }
        return {"reads": reads, **count(lines)}
    finally:
        llm.llm_engine.engine_core.shutdown()


def count(lines: list[str]) -> dict[str, Any]:
    inside = Counter(line.strip() for line in lines if line.startswith("  "))
    outside = Counter(line for line in lines if not line.startswith("  "))
    return {"graphs": outside.pop("graph", 0), "inside": dict(inside), "outside": dict(outside)}


def table(found: dict[str, dict[str, Any]]) -> str:
    methods = list(found)
    lines = [f"| operator | {' | '.join(methods)} |", "| --- |" + " --- |" * len(methods)]
    for name in found[methods[0]]["reads"]:
        lines.append(row(name, [found[method]["reads"][name] for method in methods]))
    lines.append(row("graphs launched", [found[method]["graphs"] for method in methods]))
    for where, what in (("outside", "outside of graphs"), ("inside", "in graphs")):
        lines.append(row(f"operators {what}", [sum(found[method][where].values()) for method in methods]))
        names = sorted({name for method in methods for name in found[method][where]})
        names.sort(key=lambda name: -max(found[method][where].get(name, 0) for method in methods))
        lines += [row(f"`{name}` {what}", [found[method][where].get(name, 0) for method in methods]) for name in names]
    return "\n".join(lines)


def row(name: str, amounts: list[int]) -> str:
    return f"| {name} | {' | '.join(map(str, amounts))} |"


def main() -> None:
    options = parse_options()
    environment.keep_engine_in_process("tracing a step")
    found = {method: trace_of_a_step(options.model, config) for method, config in METHODS.items()}
    print(table(found))
    common.write_json(options.json, found)
