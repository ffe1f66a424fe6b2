"""Generate with one way of drafting and report what it gained; the script that users run.

PT_HPU_LAZY_MODE=1 python tests/full_tests/spec_decode.py --task baseline --osl 512

Exit status: 0 when the task ran, 1 when it failed (the last line says why), 2 for options that make no sense.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_gaudi_spec.backends import describe_device
from vllm_gaudi_spec.demo_model import demo_model_path

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "San Francisco is know for its",  # spelled as in the set that published figures use
    "Facebook was created in 2004 by",
    "Curious George is a",
    "Python 3.11 brings improvements to its",
]
LONGEST_PROMPT = 32  # tokens, in any vocabulary that splits words into a few pieces
WARMUP_TOKENS = 16
# Two candidates closer than this count as a tie: kernels for one and for several rows round differently.
TIE = 1e-4


def no_speculation(options: argparse.Namespace) -> dict[str, Any] | None:
    return None


# Task -> what it passes to LLM(speculative_config=...)
TASKS: dict[str, Callable[[argparse.Namespace], dict[str, Any] | None]] = {
    "baseline": no_speculation,
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="baseline", choices=list(TASKS), help="how to draft")
    parser.add_argument("--model", help="Hugging Face id or folder (default: the demo model)")
    parser.add_argument("--osl", type=positive, default=512, help="tokens to generate per prompt, past any end token")
    parser.add_argument("--batch_size", type=positive, default=8, help="prompts; the eight fixed ones, repeated")
    parser.add_argument("--num_spec_tokens", type=positive, default=5, help="k, the most tokens drafted per step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="prompt i samples with seed + i")
    parser.add_argument("--dtype", help="default: float32 on the CPU, else the model's own")
    parser.add_argument("--enforce_eager", action="store_true")
    parser.add_argument("--num_warmups", type=int, default=1, help="short runs before the measured one")
    parser.add_argument("--run_base", action="store_true", help="run the baseline as well and compare the tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


# ---- running -----------------------------------------------------------------------------------------


def load(task: str, options: argparse.Namespace, device: str) -> LLM:
    return LLM(
        model=options.model or demo_model_path(),
        dtype=options.dtype or ("float32" if device == "cpu" else "auto"),
        max_model_len=LONGEST_PROMPT + options.osl,
        max_num_seqs=options.batch_size,
        enforce_eager=options.enforce_eager,
        speculative_config=TASKS[task](options),
        disable_log_stats=False,  # the draft counters are metrics
    )


def generate(llm: LLM, options: argparse.Namespace, max_tokens: int) -> list[Any]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(options.batch_size)]
    sampling = [
        SamplingParams(temperature=options.temperature, seed=options.seed + i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(options.batch_size)
    ]
    return llm.generate(prompts, sampling)


def run(task: str, options: argparse.Namespace, device: dict[str, str]) -> tuple[LLM, list[Any], dict[str, Any]]:
    """Load, warm up, measure. The engine comes back alive, for a closer look at its answers."""
    print(f"[{task}] loading", flush=True)
    llm = load(task, options, device["device"])
    for _ in range(options.num_warmups):
        print(f"[{task}] warm-up run", flush=True)
        generate(llm, options, min(WARMUP_TOKENS, options.osl))
    print(f"[{task}] measured run: {options.batch_size} x {options.osl} tokens", flush=True)
    before = draft_counts(llm)
    started = time.perf_counter()
    outputs = generate(llm, options, options.osl)
    latency = time.perf_counter() - started
    counts = {name: count - before[name] for name, count in draft_counts(llm).items()}
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = llm.collective_rpc("step_report")[0]  # all ranks take the same steps
    k = 0 if TASKS[task](options) is None else options.num_spec_tokens
    report = {
        "task": task,
        **device,
        "k": k,
        "batch_size": options.batch_size,
        "latency_s": latency,
        "tokens_per_s": num_tokens / latency,
        **acceptance(counts, k),
        "graphs": steps["graphs"],
        "host_syncs_per_step": steps["host_syncs_per_step"],
        "matches_baseline": None,
        "prompts": [output.prompt for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
    }
    return llm, outputs, report


def draft_counts(llm: LLM) -> dict[str, int]:
    """vLLM's speculative counters so far, without their prefix; the accepted ones by position as well."""
    prefix = "vllm:spec_decode_"
    counts = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    counts |= {f"accepted_at_{i}": 0 for i in range(64)}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(prefix)
        if name == "num_accepted_tokens_per_pos":
            for i, value in enumerate(metric.values):
                counts[f"accepted_at_{i}"] += value
        elif name in counts:
            counts[name] += int(metric.value)
    return counts


def acceptance(counts: dict[str, int], k: int) -> dict[str, Any]:
    drafts, drafted, accepted = (counts[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acc_counts": [counts[f"accepted_at_{i}"] for i in range(k)],
        "acc_rate": accepted / drafted if drafted else None,
        "mean_accepted_length": 1 + accepted / drafts if drafts else 1.0,
    }


# ---- comparing with the baseline -----------------------------------------------------------------------


def compare(base_llm: LLM, base: list[Any], outputs: list[Any], temperature: float) -> dict[str, int]:
    """How many texts equal the baseline's, token by token, up to the first tie."""
    verdicts = [compare_one(base_llm, *pair, temperature) for pair in zip(base, outputs, strict=True)]
    return {name: verdicts.count(name) for name in ("equal", "tied", "different")}


def compare_one(base_llm: LLM, base: Any, output: Any, temperature: float) -> str:
    base_ids, ids = list(base.outputs[0].token_ids), list(output.outputs[0].token_ids)
    if base_ids == ids:
        return "equal"
    pairs = zip(base_ids, ids, strict=False)
    first = next((i for i, (expected, got) in enumerate(pairs) if expected != got), None)
    # The noise of a sampled token is not to be had from outside, so only greedy ties can be told.
    if first is None or temperature > 0:
        return "different"
    prefix = {"prompt_token_ids": [*base.prompt_token_ids, *base_ids[:first]]}
    look = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    candidates = base_llm.generate(prefix, look, use_tqdm=False)[0].outputs[0].logprobs[0]
    if base_ids[first] not in candidates or ids[first] not in candidates:
        return "different"
    gap = abs(candidates[base_ids[first]].logprob - candidates[ids[first]].logprob)
    return "tied" if gap <= TIE else "different"


# ---- reporting -----------------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    print(f"\n=== {report['task']} (device {report['device']}, mode {report['mode']}) ===")
    print(f"k {report['k']}, batch size {report['batch_size']}")
    print(f"latency              {report['latency_s']:.2f} s")
    print(f"speed                {report['tokens_per_s']:.1f} tokens/s")
    if report["k"]:
        rate = "no drafts" if report["acc_rate"] is None else f"{report['acc_rate']:.3f}"
        print(f"acc_rate             {rate}")
        print(f"acc_counts           {report['acc_counts']}")
        print(f"mean accepted length {report['mean_accepted_length']:.2f}")
        print(f"num_drafts           {report['num_drafts']}")
        print(f"num_draft_tokens     {report['num_draft_tokens']}")
        print(f"num_accepted_tokens  {report['num_accepted_tokens']}")
    graphs = report["graphs"]
    print(f"graphs               {graphs['warmup']} in warm-up, {graphs['after_warmup']} after it")
    print(f"host syncs per step  {report['host_syncs_per_step']:.2f}")
    if report["matches_baseline"] is not None:
        print("against baseline     " + ", ".join(f"{n} {name}" for name, n in report["matches_baseline"].items()))
    for prompt, text in list(zip(report["prompts"], report["texts"], strict=True))[: len(PROMPTS)]:
        print(f"  {prompt!r}\n    -> {text!r}")
    print(flush=True)


def run_task(options: argparse.Namespace) -> None:
    device = describe_device()
    print(f"device {device['device']}, mode {device['mode']}", flush=True)
    if options.model and options.model.startswith(("/", ".", "~")) and not Path(options.model).is_dir():
        raise ValueError(f"there is no model folder {options.model}; give a folder or a Hugging Face id")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    llm, outputs, report = run(options.task, options, device)
    if options.run_base:
        del llm  # two engines at once would compete for the device
        gc.collect()
        base_llm, base_outputs, base_report = run("baseline", options, device)
        report["matches_baseline"] = compare(base_llm, base_outputs, outputs, options.temperature)
        report["baseline"] = base_report
        show(base_report)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def main() -> int:
    options = parse_options()
    try:
        run_task(options)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"error: task {options.task} failed: {reason}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
