"""Measure one way of drafting, and compare its tokens with the baseline's; a part of spec_decode.py."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm import LLM, RequestOutput, SamplingParams
from vllm.tokenizers import get_tokenizer

LONGEST_FIXED_PROMPT = 32  # tokens, in any vocabulary that splits words into a few pieces
WARMUP_TOKENS = 16
OTHER_TOKENS = 128
# Two candidates closer than this count as a tie: kernels for one and for several rows round differently.
TIE = 1e-4
MOST_POSITIONS = 64
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is the same for the task and its baseline."""

    OPTIONS: ClassVar = ("osl", "batch_size", "temperature", "seed", "enforce_eager", "num_warmups")

    model: str
    prompts: list[str]
    other_prompts: list[str]
    """For a second rate of accepted drafts, behind the measured run; or none."""
    dtype: str
    osl: int
    batch_size: int
    temperature: float
    seed: int
    enforce_eager: bool
    num_warmups: int

    def engine_options(self, config: dict[str, Any] | None) -> dict[str, Any]:
        tokenizer = get_tokenizer(self.model)
        longest = max(
            LONGEST_FIXED_PROMPT, *(len(tokenizer.encode(text)) for text in self.prompts + self.other_prompts)
        )
        return dict(
            model=self.model,
            dtype=self.dtype,
            max_model_len=longest + self.osl,
            max_num_seqs=self.batch_size,
            enforce_eager=self.enforce_eager,
            speculative_config=config,
            disable_log_stats=False,  # the draft counters are metrics
        )

    def generate(self, llm: LLM, prompts: list[str], max_tokens: int) -> list[RequestOutput]:
        sampling = [
            SamplingParams(temperature=self.temperature, seed=self.seed + i, max_tokens=max_tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        return llm.generate(prompts, sampling)


@dataclass
class Run:
    """A measured task; its engine stays for a closer look at the answers until it is closed."""

    llm: LLM | None
    outputs: list[RequestOutput]
    report: dict[str, Any]

    def close(self) -> None:
        self.llm = None
        gc.collect()


def measure(task: str, config: dict[str, Any] | None, setup: Setup, trace: Path | None = None) -> Run:
    """Load, warm up, measure."""
    print(f"[{task}] loading", flush=True)
    llm = LLM(**setup.engine_options(config))
    for _ in range(setup.num_warmups):
        print(f"[{task}] warm-up run", flush=True)
        setup.generate(llm, setup.prompts[: setup.batch_size], min(WARMUP_TOKENS, setup.osl))
    print(f"[{task}] measured run: {len(setup.prompts)} x {setup.osl} tokens", flush=True)
    before = draft_counts(llm)
    started = time.perf_counter()
    with profiled(trace):
        outputs = setup.generate(llm, setup.prompts, setup.osl)
        latency = time.perf_counter() - started
    counts = drafted_since(before, llm)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = llm.collective_rpc("step_report")[0]  # all ranks take the same steps
    k = config["num_speculative_tokens"] if config else 0
    report = {
        "task": task,
        "k": k,
        "batch_size": setup.batch_size,
        "latency_s": latency,
        "tokens_per_s": num_tokens / latency,
        **acceptance(counts, k),
        "tokens_per_step": tokens_per_step(num_tokens - len(outputs), counts["num_accepted_tokens"]),
        "graphs": steps["graphs"],
        "compiled_after_warmup": steps["device"].get("compiled_after_warmup"),
        "host_syncs_per_step": steps["host_syncs_per_step"],
        "acc_rate_elsewhere": rate_elsewhere(setup, llm) if k and setup.other_prompts else None,
        "matches_baseline": None,
        "trace": str(trace) if trace else None,
        "prompts": [output.prompt for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
    }
    return Run(llm, outputs, report)


def rate_elsewhere(setup: Setup, llm: LLM) -> float | None:
    print(f"{len(setup.other_prompts)} other prompts, for the rate of accepted drafts alone", flush=True)
    before = draft_counts(llm)
    setup.generate(llm, setup.other_prompts, min(OTHER_TOKENS, setup.osl))
    rate: float | None = acceptance(drafted_since(before, llm), 0)["acc_rate"]
    return rate


def drafted_since(before: dict[str, int], llm: LLM) -> dict[str, int]:
    return {name: count - before[name] for name, count in draft_counts(llm).items()}


def draft_counts(llm: LLM) -> dict[str, int]:
    """vLLM's speculative counters so far, without their prefix; the accepted ones by position as well."""
    prefix = "vllm:spec_decode_"
    counts = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    counts |= {f"accepted_at_{i}": 0 for i in range(MOST_POSITIONS)}
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


def tokens_per_step(num_tokens: int, accepted: int) -> float:
    """What a row gains per step of the target, steps without a draft included: the accepted drafts and one token more.
    `num_tokens` is without each row's first, which is the prompt's."""
    return num_tokens / (num_tokens - accepted) if num_tokens > accepted else 1.0


# ---- profiling -----------------------------------------------------------------------------------------


def stay_in_process() -> None:
    """A profiler sees its own process only."""
    if os.environ.setdefault(IN_PROCESS, "0") != "0":
        raise ValueError(f"--do_profile needs the engine in this process: unset {IN_PROCESS} or set it to 0")


@contextmanager
def profiled(trace: Path | None) -> Iterator[None]:
    if trace is None:
        yield
        return
    from torch.profiler import profile, supported_activities

    with profile(activities=supported_activities()) as profiler:
        yield
    profiler.export_chrome_trace(str(trace))
    print(f"trace of the measured run: {trace}", flush=True)


# ---- comparing with the baseline -----------------------------------------------------------------------


def compare(base: Run, run: Run, temperature: float) -> dict[str, int]:
    """How many texts equal the baseline's, token by token, up to the first tie."""
    pairs = zip(base.outputs, run.outputs, strict=True)
    verdicts = [compare_one(base.llm, *pair, temperature) for pair in pairs]
    return {name: verdicts.count(name) for name in ("equal", "tied", "different")}


def compare_one(base_llm: LLM, base: RequestOutput, output: RequestOutput, temperature: float) -> str:
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
