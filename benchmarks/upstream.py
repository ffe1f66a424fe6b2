"""Plain decoding on this platform beside upstream's CPU platform, in one environment.

python benchmarks/upstream.py --json .bench/upstream.json

Each measurement is an engine process of its own, never two at once: ours, upstream's, ours, upstream's, ...
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import common

BATCHES = (1, 8)
NEW_TOKENS = 128
PROMPT = "The history of the city begins"
# What decides the platform; everything else is the same for both.
PLATFORMS = {
    "ours": {"VLLM_PLUGINS": "gaudi_spec", "VGS_DEVICE": "cpu"},
    "upstream": {"VLLM_PLUGINS": ""},
}
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face id or folder (default: the demo model)")
    parser.add_argument("--repeats", type=int, default=3, help="engine processes per platform")
    parser.add_argument("--max_num_seqs", type=int, help="for both (default: vLLM's own)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--part", choices=[*PLATFORMS, "bandwidth"], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- in the child processes ----------------------------------------------------------------------------


def measure_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Start-up seconds, from the start of this process, then speed and step time at each batch size."""
    from vllm import LLM

    check_platform(options.part)
    engine_options: dict[str, Any] = {} if options.max_num_seqs is None else {"max_num_seqs": options.max_num_seqs}
    llm = LLM(
        model=options.model,
        dtype="float32",
        enforce_eager=options.part == "upstream",
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
        **engine_options,
    )
    startup = time.time() - options.started
    generate_seconds(llm, 1, 16)
    batches = {str(batch): measure_batch(llm, batch) for batch in BATCHES}
    return {"startup_s": startup, "batches": batches}


def check_platform(wanted: str) -> None:
    from vllm.platforms import current_platform

    expected = "vllm_gaudi_spec" if wanted == "ours" else "vllm."
    if not type(current_platform).__module__.startswith(expected):
        raise RuntimeError(f"wanted the platform {wanted}, vLLM chose {type(current_platform).__qualname__}")


def measure_batch(llm: Any, batch: int) -> dict[str, float]:
    generate_seconds(llm, batch, 16)
    # The first token is the prompt's; what the others take is decode steps alone.
    first = generate_seconds(llm, batch, 1)
    whole = generate_seconds(llm, batch, NEW_TOKENS)
    return {"tok_s": batch * NEW_TOKENS / whole, "step_s": (whole - first) / (NEW_TOKENS - 1)}


def generate_seconds(llm: Any, batch: int, new_tokens: int) -> float:
    from vllm import SamplingParams

    prompts = [f"{PROMPT} {i}." for i in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    if generated != batch * new_tokens:
        raise RuntimeError(f"{generated} tokens came back where {batch * new_tokens} were asked for")
    return seconds


def run_part(options: argparse.Namespace) -> None:
    if options.part == "bandwidth":
        answer: dict[str, Any] = {"bytes_per_s": common.read_bandwidth(), **common.describe_machine()}
    else:
        answer = measure_engine(options)
    common.hand_back(options.result, answer)


# ---- in the parent -------------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace, model: str) -> dict[str, list[dict[str, Any]]]:
    samples: dict[str, list[dict[str, Any]]] = {platform: [] for platform in PLATFORMS}
    for repeat in range(options.repeats):
        for platform, environment in PLATFORMS.items():
            common.say(f"[{repeat + 1}/{options.repeats}] {platform}: an engine process of its own ...")
            part = ["--part", platform, "--model", model]
            if options.max_num_seqs is not None:
                part += ["--max_num_seqs", str(options.max_num_seqs)]
            sample = common.run_part(
                Path(__file__),
                part,
                log=f"upstream-{platform}-{repeat + 1}",
                environment={**QUIET, **environment},
                seconds=900,
            )
            samples[platform].append(sample)
            speeds = ", ".join(f"batch {b}: {facts['tok_s']:.1f} tok/s" for b, facts in sample["batches"].items())
            common.say(f"      ready after {sample['startup_s']:.1f} s; {speeds}")
    return samples


def compare(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def middle(platform: str, batch: int, name: str) -> float:
        return median(sample["batches"][str(batch)][name] for sample in samples[platform])

    rows = []
    for batch in BATCHES:
        ours, upstream = middle("ours", batch, "tok_s"), middle("upstream", batch, "tok_s")
        rows.append(
            {
                "case": f"batch {batch}",
                "ours_tok_s": ours,
                "upstream_tok_s": upstream,
                "ratio": ours / upstream,
            }
        )
    startup = {platform: median(sample["startup_s"] for sample in samples[platform]) for platform in PLATFORMS}
    steps = {f"{platform}_s": middle(platform, 1, "step_s") for platform in PLATFORMS}
    return {
        "rows": rows,
        "startup_s": {**startup, "ratio": startup["ours"] / startup["upstream"]},
        "decode_step": {"batch": 1, **steps},
    }


def add_memory_bound(decode_step: dict[str, Any], folder: Path, bytes_per_s: float) -> None:
    """What a decode step at batch 1 would take if reading weights and KV were all it did (float32)."""
    mean_context = NEW_TOKENS // 2
    num_bytes = common.weights_read_per_step(folder, 4) + mean_context * common.kv_bytes_per_token(folder, 4)
    bound = num_bytes / bytes_per_s
    decode_step |= {
        "bytes_read": num_bytes,
        "read_gb_s": bytes_per_s / 1e9,
        "bound_s": bound,
        "ours_over_bound": decode_step["ours_s"] / bound,
        "upstream_over_bound": decode_step["upstream_s"] / bound,
    }


def show(report: dict[str, Any]) -> None:
    rows = [
        [row["case"], f"{row['ours_tok_s']:.1f}", f"{row['upstream_tok_s']:.1f}", f"{row['ratio']:.2f}"]
        for row in report["rows"]
    ]
    startup = report["startup_s"]
    rows.append(
        ["start-up, s", f"{startup['ours']:.1f}", f"{startup['upstream']:.1f}", f"{startup['ratio']:.2f}"],
    )
    common.say(f"\nfloat32, {NEW_TOKENS} new tokens, tokens/s, median of {len(report['samples']['ours'])}")
    common.say(common.table(["case", "ours", "upstream", "ratio"], rows))
    step = report["decode_step"]
    ours_ms, upstream_ms, bound_ms = (1e3 * step[name] for name in ("ours_s", "upstream_s", "bound_s"))
    common.say(
        f"\nplain decode step, batch 1: ours {ours_ms:.1f} ms, upstream {upstream_ms:.1f} ms"
        f"\nits memory bound: {step['bytes_read'] / 1e6:.0f} MB at {step['read_gb_s']:.1f} GB/s measured = "
        f"{bound_ms:.1f} ms; ours takes {step['ours_over_bound']:.2f} of it, "
        f"upstream {step['upstream_over_bound']:.2f}\n\n{common.NOISE_NOTE}"
    )


def compare_platforms(options: argparse.Namespace) -> None:
    model = options.model
    if model is None:
        from vllm_gaudi_spec.demo_model import demo_model_path

        model = demo_model_path()
    folder = common.model_folder(model)
    common.say("memory read bandwidth ...")
    machine = common.run_part(
        Path(__file__), ["--part", "bandwidth"], log="upstream-bandwidth", environment={}, seconds=300
    )
    common.say(f"      {machine['bytes_per_s'] / 1e9:.1f} GB/s with {machine['threads']} threads")
    common.warn_if_busy()
    samples = measure_all(options, str(folder))
    report = {**compare(samples), "machine": machine, "model": model, "samples": samples}
    add_memory_bound(report["decode_step"], folder, machine["bytes_per_s"])
    show(report)
    common.write_json(options.json, report)


def main() -> int:
    options = parse_options()
    if options.part:
        run_part(options)
        return 0
    try:
        compare_platforms(options)
    except RuntimeError as error:
        common.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
