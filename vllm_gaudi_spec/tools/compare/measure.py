"""Measures speculation methods side by side and compares their tokens with the baseline's.

On a busy machine, speeds that are measured minutes apart differ by more than the speedup from drafting. Engines
therefore take turns: in each turn, all engines answer each batch of prompts one after another, in alternating order.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.tokenizers import get_tokenizer

from vllm_gaudi_spec.tools.io.output import counting
from vllm_gaudi_spec.upstream.tools import get_config

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, SamplingParams


Log = Callable[[str], None]

LONGEST_FIXED_PROMPT = 32
"""Upper bound on the number of tokens in a fixed prompt, for any vocabulary."""
WARMUP_TOKENS = 16
# Two candidates are tied if their scores differ by less than this, because rounding depends on the number of rows.
TIE = 1e-4
# A drafter has its own cache, and blocks are not always full.
_KV_FACTOR = 3
_MIN_KV = 256 << 20
# With a single turn, other work on the machine changed ratios by up to a factor of two.
_MIN_TURNS = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that all tasks of a comparison share."""

    OPTIONS: ClassVar = ("osl", "batch_size", "temperature", "seed", "num_warmups", "turns")

    model: str
    prompts: list[str]
    dtype: str
    osl: int
    batch_size: int
    temperature: float
    seed: int
    num_warmups: int
    turns: int
    kv_bytes: int | None = None
    """Size of the KV cache of each engine, if several engines share the memory."""

    def engine_options(self, config: dict[str, Any] | None) -> dict[str, Any]:
        tokenizer = get_tokenizer(self.model)
        longest = max(LONGEST_FIXED_PROMPT, *(len(tokenizer.encode(text)) for text in self.prompts))
        return dict(
            model=self.model,
            dtype=self.dtype,
            max_model_len=longest + self.osl,
            max_num_seqs=self.batch_size,
            speculative_config=config,
            enable_prefix_caching=False,  # each turn must compute the prompts again
            **({"kv_cache_memory_bytes": self.kv_bytes} if self.kv_bytes else {}),
            **({"per_request_spec_decode_metrics": "summary"} if config else {}),
        )

    def sharing(self, num_engines: int, bytes_for_kv: int) -> Setup:
        """Return the setup for engines that run side by side, with KV caches that are no larger than needed."""
        needed = self.batch_size * self.engine_options(None)["max_model_len"] * kv_bytes_per_token(self.model)
        kv_bytes = min(max(_KV_FACTOR * needed, _MIN_KV), bytes_for_kv // num_engines)
        return replace(self, kv_bytes=kv_bytes)

    def generate(
        self,
        llm: LLM,
        prompts: Sequence[str],
        max_tokens: int,
        more: Callable[[int], None] | None = None,
        first: int = 0,
    ) -> list[Answer]:
        """Answer the prompts. `first` is the index of the first prompt, which determines the seeds."""
        sampling = [
            SamplingParams(temperature=self.temperature, seed=self.seed + i, max_tokens=max_tokens, ignore_eos=True)
            for i in range(first, first + len(prompts))
        ]
        return ask(llm, prompts, sampling, more)


def kv_bytes_per_token(model: str) -> int:
    """Return the bytes of KV per token in float32, an upper bound for models without full attention."""
    config = get_config(model, trust_remote_code=False).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * int(config.num_hidden_layers * heads * head_size)


class Run:
    """A task and its engine, which stays loaded until `close` is called."""

    def __init__(self, task: str, config: dict[str, Any] | None, setup: Setup, log: Log) -> None:
        """Load the engine and warm it up."""
        self.task, self.setup, self._config, self._log = task, setup, config, log
        self.answers: list[Answer] = []
        """The answers from the first turn."""
        self.seconds: Seconds = []
        self.latencies: list[list[dict[str, float | None]]] = []
        """Latencies by turn and answer."""
        self.report: dict[str, Any] = {}
        log(f"[{task}] loading")
        self.llm: LLM | None = LLM(**setup.engine_options(config))
        for _ in range(setup.num_warmups):
            log(f"[{task}] warm-up run")
            setup.generate(self.llm, setup.prompts[: setup.batch_size], min(WARMUP_TOKENS, setup.osl))

    def take(self, turn: int, batch: range, more: Callable[[int], None]) -> None:
        """Answer a batch of prompts. The answers are stored in the first turn."""
        assert self.llm is not None, "it was closed"
        prompts = [self.setup.prompts[i] for i in batch]
        started = time.perf_counter()
        answers = self.setup.generate(self.llm, prompts, self.setup.osl, more, batch.start)
        if turn == len(self.seconds):
            self.seconds.append([])
            self.latencies.append([])
        self.seconds[turn].append(time.perf_counter() - started)
        self.latencies[turn] += [answer.latency() for answer in answers]
        if turn == 0:
            self.answers += answers

    def finish(self, trace: Path | None = None) -> None:
        """Create the report after the last turn."""
        assert self.llm is not None, "it was closed"
        setup, llm, config = self.setup, self.llm, self._config
        num_tokens = sum(len(answer.token_ids) for answer in self.answers)
        latency = sum_median_seconds(self.seconds)
        steps = llm.collective_rpc("step_report")[0]  # all ranks run the same steps
        k = config["num_speculative_tokens"] if config else 0
        tokenizer = llm.get_tokenizer()
        self.report = {
            "task": self.task,
            "k": k,
            "draft_model": (config or {}).get("model"),
            "batch_size": setup.batch_size,
            "latency_s": latency,
            "tokens_per_s": num_tokens / latency,
            "seconds": self.seconds,
            "latencies": self.latencies,
            "speedup": None,
            **(drafted := count_acceptance(self.answers, k)),
            "tokens_per_step": compute_tokens_per_step(num_tokens - len(self.answers), drafted["num_accepted_tokens"]),
            "graphs": steps["graphs"],
            "compiled_after_warmup": steps["device"].get("compiled_after_warmup"),
            "steps": steps["steps"],
            "host_syncs_per_step": steps["host_syncs_per_step"],
            "matches_baseline": None,
            "trace": str(trace) if trace else None,
            "answers": [
                {"prompt": answer.prompt, "pieces": answer.pieces(tokenizer), "steps": answer.steps()}
                for answer in self.answers
            ],
        }

    def compare_with(self, base: Run) -> None:
        """Add the comparison with the baseline to the report, using the baseline's engine to detect ties."""
        self.report["matches_baseline"] = compare_texts(base, self)
        self.report["speedup"] = compute_speedup(base.seconds, self.seconds)

    def close(self) -> None:
        self.llm = None
        gc.collect()


def profile_to(trace: Path | None) -> AbstractContextManager[Any]:
    """If a file is given, write a torch.profiler trace of the code in this context."""
    if trace is None:
        return nullcontext()
    from torch.profiler import profile, supported_activities

    return profile(activities=supported_activities(), on_trace_ready=lambda made: made.export_chrome_trace(str(trace)))


def take_turns(runs: Sequence[Run], setup: Setup, log: Log, enough_s: float = math.inf) -> dict[str, Exception]:
    """Run all turns of these engines, batch by batch. Returns the errors of failed tasks; other tasks continue.

    After the first two turns, no turn starts later than `enough_s` seconds after the start of the first one.
    """
    names, failed = ", ".join(run.task for run in runs), dict[str, Exception]()
    started, window = time.perf_counter(), 0
    for turn in range(setup.turns):
        if turn >= _MIN_TURNS and time.perf_counter() - started >= enough_s:
            log(f"[{names}] {turn} of {setup.turns} turns took more than {enough_s:.0f} s: no further turn")
            break
        log(f"[{names}] measured turn {turn + 1} of {setup.turns}: {len(setup.prompts)} x {setup.osl} tokens each")
        left = [run for run in runs if run.task not in failed]
        with counting(f"[{names}] tokens", len(left) * len(setup.prompts) * setup.osl) as more:
            for batch in batches(len(setup.prompts), setup.batch_size):
                for run in in_order([run for run in left if run.task not in failed], window):
                    try:
                        run.take(turn, batch, more)
                    except Exception as error:
                        failed[run.task] = error
                window += 1
    return failed


def count_acceptance(answers: Sequence[Answer], k: int) -> dict[str, Any]:
    """Count drafts per request, because vLLM's counters cover only the newest engine in a process."""
    # Number of steps with drafts in which 0, 1, ... k drafts were accepted.
    lengths = [sum(answer.histogram[number] for answer in answers if answer.histogram) for number in range(k + 1)]
    drafts, drafted = sum(lengths), sum(answer.num_draft_tokens for answer in answers)
    accepted = sum(length * steps for length, steps in enumerate(lengths))
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "accepted_lengths": lengths,
        "acc_counts": [sum(lengths[position:]) for position in range(1, k + 1)],
        "acc_rate": accepted / drafted if drafted else None,
        "mean_accepted_length": 1 + accepted / drafts if drafts else 1.0,
    }


def compute_tokens_per_step(num_tokens: int, accepted: int) -> float:
    """Return the mean number of tokens per request and target step, including steps without drafts.

    `num_tokens` excludes the first token of each request, which is sampled in the prompt's step.
    """
    return num_tokens / (num_tokens - accepted) if num_tokens > accepted else 1.0


# ---- comparison with the baseline -----------------------------------------------------------------------


def compare_texts(base: Run, run: Run) -> dict[str, int]:
    """Count the texts that are equal to the baseline's token by token, tied with them, or different from them."""
    assert base.llm is not None, "the baseline's engine is asked about ties"
    pairs = zip(base.answers, run.answers, strict=True)
    found = [_compare_text(base.llm, *pair, base.setup.temperature) for pair in pairs]
    return {name: found.count(name) for name in ("equal", "tied", "different")}


def _compare_text(base_llm: LLM, base: Answer, answer: Answer, temperature: float) -> str:
    if base.token_ids == answer.token_ids:
        return "equal"
    pairs = zip(base.token_ids, answer.token_ids, strict=False)
    first = next((i for i, (expected, got) in enumerate(pairs) if expected != got), None)
    # The engine does not report the noise with which a token was sampled, so only greedy ties are detected.
    if first is None or temperature > 0:
        return "different"
    prefix = tokens_input([*base.prompt_ids, *base.token_ids[:first]])
    look = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    candidates = base_llm.generate(prefix, look, use_tqdm=False)[0].outputs[0].logprobs[0]
    expected, got = base.token_ids[first], answer.token_ids[first]
    if expected not in candidates or got not in candidates:
        return "different"
    return "tied" if abs(candidates[expected].logprob - candidates[got].logprob) <= TIE else "different"


# ---- answers, step by step --------------------------------------------------------------------------


@dataclass
class Answer:
    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Number of tokens in each target step. The first step is that of the prompt."""
    histogram: list[int] = field(default_factory=list)
    """Number of steps with drafts in which 0, 1, ... k drafts were accepted. Empty without speculation."""
    num_draft_tokens: int = 0
    at: list[float] = field(default_factory=list)
    """Seconds from the start of the request to the output of each step."""

    def take(self, completion: CompletionOutput, seconds: float) -> int:
        """Add the output of a step, received `seconds` after the request, and return its number of tokens."""
        new = list(completion.token_ids)
        if new:
            self.token_ids += new
            self.sizes.append(len(new))
            self.at.append(seconds)
        if completion.spec_decode_metrics is not None:
            self.histogram = list(completion.spec_decode_metrics.histogram)
            self.num_draft_tokens = completion.spec_decode_metrics.num_draft_tokens
        return len(new)

    def latency(self) -> dict[str, float | None]:
        """Return TTFT, TPOT, and median ITL in seconds, as defined by vLLM's benchmark."""
        first, last, later = self.at[0], self.at[-1], len(self.token_ids) - self.sizes[0]
        gaps = [after - before for before, after in zip(self.at, self.at[1:], strict=False)]
        return {
            "ttft": first,
            "tpot": (last - first) / later if later else None,
            "itl": median(gaps) if gaps else None,
        }

    def steps(self) -> list[tuple[int, int]]:
        """Return the number of tokens and the number of accepted drafts in each step.

        The last token in a step is the target's own, unless the end of the answer cut it off. If the engine counted
        more drafts than these tokens account for, the remaining drafts belong to the last step.
        """
        drafts = [size - 1 for size in self.sizes]
        if drafts:
            drafts[-1] += sum(number * steps for number, steps in enumerate(self.histogram)) - sum(drafts)
        steps = list(zip(self.sizes, drafts, strict=True))
        if any(not 0 <= accepted <= size for size, accepted in steps):
            raise RuntimeError(f"the number of accepted drafts contradicts the number of tokens of the steps: {steps}")
        return steps

    def pieces(self, tokenizer: Any) -> list[str]:
        """Return the text added by each token, as detokenized by vLLM."""
        from vllm_gaudi_spec.upstream.tools import IncrementalDetokenizer

        request: Any = SimpleNamespace(
            request_id="", sampling_params=self.params, prompt_token_ids=self.prompt_ids, prompt_embeds=None
        )
        text = IncrementalDetokenizer.from_new_request(tokenizer, request)
        pieces = []
        for token in self.token_ids:
            before = len(text.output_text)
            text.update([token], False)
            pieces.append(text.output_text[before:])
        return pieces


def ask(
    llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams], more: Callable[[int], None] | None = None
) -> list[Answer]:
    """Generate text with the engine. `more` is called with the number of new tokens in each step."""
    from vllm.sampling_params import RequestOutputKind

    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    answers, started = {}, time.perf_counter()
    for number, (text, sampling) in enumerate(zip(prompts, params, strict=True)):
        answer = answers[str(number)] = Answer(text, tokenizer.encode(text), sampling)
        sampling.output_kind = RequestOutputKind.DELTA
        engine.add_request(str(number), tokens_input(answer.prompt_ids, prompt=text), sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        seconds = time.perf_counter() - started
        brought = sum(answers[output.request_id].take(output.outputs[0], seconds) for output in outputs)
        if more is not None:
            more(brought)
    return list(answers.values())


# ---- turns -------------------------------------------------------------------------------------------


T = TypeVar("T")
Seconds = list[list[float]]
"""Times of an engine in seconds, by turn and by batch of prompts."""

# Fraction of the memory left by the first engine that all other engines may need together. An engine with a drafter
# needs more than the first one.
_SHARE_OF_FREE_MEMORY = 0.7


def batches(num_prompts: int, batch_size: int) -> list[range]:
    return [range(first, min(first + batch_size, num_prompts)) for first in range(0, num_prompts, batch_size)]


def in_order(engines: Sequence[T], window: int) -> list[T]:
    """Alternate the order of the engines, so that no engine is always first or always follows the same engine."""
    return list(engines) if window % 2 == 0 else list(reversed(engines))


def sum_median_seconds(seconds: Seconds) -> float:
    """Return the seconds for all prompts, based on the median turn for each batch."""
    return sum(map(median, zip(*seconds, strict=True)))


def compute_speedup(base: Seconds, seconds: Seconds) -> dict[str, float]:
    """Return the median and quartiles of the speedup, which is computed for each batch within a turn."""
    quotients = [other / one for turns in zip(base, seconds, strict=True) for other, one in zip(*turns, strict=True)]
    if len(quotients) == 1:
        quotients *= 2  # quantiles() requires at least two values
    low, middle, high = quantiles(quotients, n=4, method="inclusive")
    return {"ratio": middle, "low": low, "high": high}


def explain_lack_of_memory(num_engines: int, first: int, free: int) -> str | None:
    """Return the reason why engines that need as much memory as the first one do not fit side by side, or None."""
    needed = (num_engines - 1) * first
    if needed <= _SHARE_OF_FREE_MEMORY * free:
        return None
    return f"the other engines need about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
