"""What FP8 costs in quality: perplexity with a target, or its KV alone, in FP8, and acceptance with a drafter in FP8.

Wants the folder of a calibration of the two models (`calibration/calibrate_model.sh MODEL --draft DRAFT --out FOLDER`).
FP8 is the simulation that runs without a Gaudi: casts, scales and sums as a Gaudi has them, the rest in float32.

    python benchmarks/fp8.py FOLDER

Perplexity is that of text which no calibration saw, in windows of 500 tokens. Beside FP8 stand the model in float32, by
the same engine, and in bfloat16, by transformers, weights and activations both. Acceptance is that of the target in
float32 with greedy decoding, on prompts that neither the calibration nor the training of the demo drafters saw: all
cases see the same texts.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import common
import speculation_common as shared
from common import log

from vllm_gaudi_spec.tools.io.command_line import add_shared

# Technical prose that no model was trained on, kept as it is: an edition of this project's own docs/architecture.md.
TEXT = Path(__file__).parent / "held_out.txt"
WINDOW = 500
METHODS = ("maxabs_pow2", "act_maxabs_pow2_weights_pcs_maxabs_pow2", "maxabs_arbitrary", "maxabs_hw")
FLOAT32, BFLOAT16 = "float32", "bfloat16"
KV = {"KV, gaudi3": "gaudi3", "KV, gaudi2": "gaudi2"}
"""Cases of --kv-cache-dtype fp8, and whose range it has. Scales are 1.0: the model brings none."""


def parse_options() -> argparse.Namespace:
    parser = shared.parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="folder of a calibration")
    parser.add_argument("--model", metavar="MODEL", help="the target (default: the demo model)")
    add_shared(
        parser.add_argument,
        "--draft",
        default=str(shared.SAME_VOCAB["model"]),
        metavar="MODEL",
        help="the drafter (default: the demo's)",
    )
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), metavar="NAME", help="scale methods of the calibration"
    )
    parser.add_argument(
        "--text", type=Path, default=TEXT, metavar="FILE", help="text for the perplexity (default: held_out.txt here)"
    )
    parser.add_argument("--num-tokens", type=int, default=2000, metavar="N", help="tokens of that text")
    common.add_output_len(parser, 64)
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of each kind (default: all)")
    common.add_num_drafts(parser, "num_drafts", 3)
    parser.add_argument("--json", type=Path, metavar="FILE", default=common.LOGS / "fp8.json", help="the report")
    return parser.parse_args()


# ---- perplexity ----------------------------------------------------------------------------------------


def windows(options: argparse.Namespace) -> list[list[int]]:
    """Each begins with the last token of the one before, so that all but the text's first are foretold once."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(options.model).encode(options.text.read_text(), add_special_tokens=False)
    if len(ids) <= options.num_tokens:
        raise RuntimeError(f"{options.text} has {len(ids)} tokens only")
    starts = range(0, options.num_tokens, WINDOW)
    return [ids[start : min(start + WINDOW, options.num_tokens) + 1] for start in starts]


def perplexity_of_engine(options: argparse.Namespace) -> float:
    from vllm import SamplingParams

    texts, case = windows(options), options.part.partition(":")[2]
    kv: dict[str, Any] = {}
    if case in KV:
        kv = {"kv_cache_dtype": "fp8", "additional_config": {"gaudi_spec": {"fp8_range": KV[case]}}}
    # One window at a time: what attention computes on is then as long as a window, not as all of them.
    sizes = dict(max_model_len=WINDOW + 16, max_num_seqs=1, max_num_batched_tokens=512)
    with shared.engine(options.model, **sizes, **kv) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in texts],
            SamplingParams(max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
    scores = [
        position[token].logprob
        for ids, output in zip(texts, outputs, strict=True)
        for token, position in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert len(scores) == options.num_tokens
    return math.exp(-sum(scores) / len(scores))


def perplexity_of_transformers(options: argparse.Namespace) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    total = 0.0
    for ids in windows(options):
        with torch.inference_mode():
            scores = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        total += scores.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    return math.exp(-total / options.num_tokens)


# ---- acceptance ----------------------------------------------------------------------------------------


def acceptance(options: argparse.Namespace) -> dict[str, Any]:
    """`options.part` names the drafter's way of making scales, or float32."""
    method = options.part.partition(":")[2]
    spec_options = {} if method == FLOAT32 else {"draft_quant_config": str(quant_config(options, "draft", method))}
    speculative = {"method": "draft_model", "model": options.draft, "num_speculative_tokens": options.num_drafts}
    texts = [*shared.texts_named("openings", options.prompts), *shared.texts_named("general", options.prompts)]
    with shared.engine(
        options.model,
        speculative,
        max_model_len=512,
        max_num_seqs=16,
        per_request_spec_decode_metrics="detailed",
        additional_config={"gaudi_spec": spec_options},
    ) as llm:
        prompts = shared.encode(llm.get_tokenizer(), texts, bos=False)
        requests = shared.ask(llm, prompts, 0.0, options.tokens, options.num_drafts)["requests"]
    drafted = sum(request["drafted"] for request in requests)
    accepted = sum(sum(request["accepted"]) for request in requests)
    steps = [count for request in requests for count in request["accepted"]]
    positions = range(1, options.num_drafts + 1)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "rate": accepted / drafted,
        "by_place": [sum(count >= position for count in steps) / len(steps) for position in positions],
        "tokens_per_step": sum(r["tokens"] for r in requests) / sum(r["steps"] for r in requests),
    }


# ---- all of it -----------------------------------------------------------------------------------------


def quant_config(options: argparse.Namespace, role: str, method: str) -> Path:
    path: Path = options.folder / role / f"quant_{method}.json"
    if not path.exists():
        raise RuntimeError(f"{path} is missing: calibrate both models with this scale method first")
    return path


def part(options: argparse.Namespace) -> Any:
    kind, _, _ = options.part.partition(":")
    return {
        "perplexity": perplexity_of_engine,
        "transformers": perplexity_of_transformers,
        "acceptance": acceptance,
    }[kind](options)


def run(options: argparse.Namespace, name: str, environment: dict[str, str] | None = None) -> Any:
    words = shared.cli(options, "model", "draft", "text", "num_tokens", "tokens", "prompts", "num_drafts")
    log(f"  {name} ...")
    return common.run_part(
        Path(__file__),
        [str(options.folder.resolve()), "--part", name, *words],
        log_name=f"fp8-{name.replace(':', '-')}",
        environment={**shared.IN_PROCESS, **(environment or {})},
        seconds=1800,
    )


def whole(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    options.model = options.model or demo_model_path()
    targets = {method: quant_config(options, "target", method) for method in options.methods}
    for method in options.methods:
        quant_config(options, "draft", method)
    common.warn_if_busy()
    perplexity = {FLOAT32: run(options, f"perplexity:{FLOAT32}"), BFLOAT16: run(options, f"transformers:{BFLOAT16}")}
    for case in KV:
        perplexity[case] = run(options, f"perplexity:{case}")
    for method, path in targets.items():
        perplexity[method] = run(options, f"perplexity:{method}", {"QUANT_CONFIG": str(path)})
    rates = {name: run(options, f"acceptance:{name}") for name in (FLOAT32, *options.methods)}
    show(options, perplexity, rates)
    report = {"machine": common.describe_machine(), "perplexity": perplexity, "acceptance": rates}
    common.write_json(options.json, report)


def show(options: argparse.Namespace, perplexity: dict[str, float], rates: dict[str, dict[str, Any]]) -> None:
    log(f"\nPerplexity of {options.num_tokens} tokens of {options.text.name}, target in FP8\n")
    log("| target | perplexity | beside bfloat16 | beside float32 |\n| --- | ---: | ---: | ---: |")
    for name, value in perplexity.items():
        beside = [f"{100 * (value / perplexity[base] - 1):+.2f} %" for base in (BFLOAT16, FLOAT32)]
        log(f"| {name} | {value:.3f} | {beside[0]} | {beside[1]} |")
    log(f"\nAcceptance with the target in float32, greedy, {options.num_drafts} drafts a step\n")
    positions = [f"position {position}" for position in range(1, options.num_drafts + 1)]
    log(f"| drafter | acceptance rate | beside float32 | {' | '.join(positions)} | over all steps |")
    log(f"| --- | ---: | ---: | {' | '.join('---:' for _ in positions)} | ---: |")
    for name, found in rates.items():
        points = 100 * (found["rate"] - rates[FLOAT32]["rate"])
        by_position = " | ".join(f"{100 * rate:.1f} %" for rate in found["by_place"])
        rate = f"{100 * found['rate']:.2f} %"
        log(f"| {name} | {rate} | {points:+.2f} points | {by_position} | {found['tokens_per_step']:.2f} |")


if __name__ == "__main__":
    options = parse_options()
    raise SystemExit(shared.run_main(options, lambda: part(options), lambda: whole(options)))
