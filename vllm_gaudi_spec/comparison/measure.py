"""Measure one way of drafting, and compare its tokens with the baseline's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.tokenizers import get_tokenizer

from vllm_gaudi_spec.comparison.answers import Answer, ask
from vllm_gaudi_spec.terminal import counting

Say = Callable[[str], None]

LONGEST_FIXED_PROMPT = 32  # tokens, in any vocabulary that splits words into a few pieces
WARMUP_TOKENS = 16
OTHER_TOKENS = 128
# Two candidates closer than this count as a tie: kernels for one and for several rows round differently.
TIE = 1e-4
MOST_POSITIONS = 64


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
            **({"per_request_spec_decode_metrics": "summary"} if config else {}),
        )

    def generate(
        self, llm: LLM, prompts: list[str], max_tokens: int, more: Callable[[int], None] | None = None
    ) -> list[Answer]:
        sampling = [
            SamplingParams(temperature=self.temperature, seed=self.seed + i, max_tokens=max_tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        return ask(llm, prompts, sampling, more)


@dataclass
class Run:
    """A measured task; its engine stays for a closer look at the answers until it is closed."""

    llm: LLM | None
    answers: list[Answer]
    report: dict[str, Any]

    def close(self) -> None:
        self.llm = None
        gc.collect()


def measure(task: str, config: dict[str, Any] | None, setup: Setup, say: Say, trace: Path | None = None) -> Run:
    """Load, warm up, measure."""
    say(f"[{task}] loading")
    llm = LLM(**setup.engine_options(config))
    for _ in range(setup.num_warmups):
        say(f"[{task}] warm-up run")
        setup.generate(llm, setup.prompts[: setup.batch_size], min(WARMUP_TOKENS, setup.osl))
    say(f"[{task}] measured run: {len(setup.prompts)} x {setup.osl} tokens")
    before = draft_counts(llm)
    with counting(f"[{task}] tokens", len(setup.prompts) * setup.osl) as more:
        started = time.perf_counter()
        with profiled(trace, say):
            answers = setup.generate(llm, setup.prompts, setup.osl, more)
            latency = time.perf_counter() - started
    counts = drafted_since(before, llm)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    steps = llm.collective_rpc("step_report")[0]  # all ranks take the same steps
    k = config["num_speculative_tokens"] if config else 0
    tokenizer = llm.get_tokenizer()
    report = {
        "task": task,
        "k": k,
        "draft_model": (config or {}).get("model"),
        "batch_size": setup.batch_size,
        "latency_s": latency,
        "tokens_per_s": num_tokens / latency,
        **acceptance(counts, k),
        "accepted_lengths": accepted_lengths(answers, k),
        "tokens_per_step": tokens_per_step(num_tokens - len(answers), counts["num_accepted_tokens"]),
        "graphs": steps["graphs"],
        "compiled_after_warmup": steps["device"].get("compiled_after_warmup"),
        "steps": steps["steps"],
        "host_syncs_per_step": steps["host_syncs_per_step"],
        "acc_rate_elsewhere": rate_elsewhere(setup, llm, say) if k and setup.other_prompts else None,
        "matches_baseline": None,
        "trace": str(trace) if trace else None,
        "answers": [
            {"prompt": answer.prompt, "pieces": answer.pieces(tokenizer), "steps": answer.steps()} for answer in answers
        ],
    }
    return Run(llm, answers, report)


def accepted_lengths(answers: Sequence[Answer], k: int) -> list[int]:
    """How many steps with drafts accepted 0, 1, ... k of them."""
    return [sum(answer.histogram[number] for answer in answers if answer.histogram) for number in range(k + 1)]


def rate_elsewhere(setup: Setup, llm: LLM, say: Say) -> float | None:
    say(f"{len(setup.other_prompts)} other prompts, for the rate of accepted drafts alone")
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


@contextmanager
def profiled(trace: Path | None, say: Say) -> Iterator[None]:
    if trace is None:
        yield
        return
    from torch.profiler import profile, supported_activities

    with profile(activities=supported_activities()) as profiler:
        yield
    profiler.export_chrome_trace(str(trace))
    say(f"trace of the measured run: {trace}")


# ---- comparing with the baseline -----------------------------------------------------------------------


def compare(base: Run, run: Run, temperature: float) -> dict[str, int]:
    """How many texts equal the baseline's, token by token, up to the first tie."""
    assert base.llm is not None, "the baseline's engine is asked about ties"
    pairs = zip(base.answers, run.answers, strict=True)
    verdicts = [compare_one(base.llm, *pair, temperature) for pair in pairs]
    return {name: verdicts.count(name) for name in ("equal", "tied", "different")}


def compare_one(base_llm: LLM, base: Answer, answer: Answer, temperature: float) -> str:
    if base.token_ids == answer.token_ids:
        return "equal"
    pairs = zip(base.token_ids, answer.token_ids, strict=False)
    first = next((i for i, (expected, got) in enumerate(pairs) if expected != got), None)
    # The noise of a sampled token is not to be had from outside, so only greedy ties can be told.
    if first is None or temperature > 0:
        return "different"
    prefix = tokens_input([*base.prompt_ids, *base.token_ids[:first]])
    look = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    candidates = base_llm.generate(prefix, look, use_tqdm=False)[0].outputs[0].logprobs[0]
    expected, got = base.token_ids[first], answer.token_ids[first]
    if expected not in candidates or got not in candidates:
        return "different"
    return "tied" if abs(candidates[expected].logprob - candidates[got].logprob) <= TIE else "different"
