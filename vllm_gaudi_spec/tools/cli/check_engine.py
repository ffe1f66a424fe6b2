"""The engine part of graph-check, in a process whose environment `graph_check.command` has set."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.tools.cli import counting, make_parser
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.output import counting as counting_requests

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


# Engine steps between two reads of the counters.
_LOOK_EVERY = 1000
# The emulated card's error where a real one would fail.
_REFUSAL = "DeviceRefusal"


class WrongOptions(Exception):
    """The engine refuses the options; the message names them and the remedy."""


def main() -> int:
    options = make_parser().parse_args()
    return output.guarded("graph-check", lambda: checked(options), verbose=options.verbose)


def checked(options: argparse.Namespace) -> int:
    try:
        result = check(options)
    except WrongOptions as error:
        return output.fail("graph-check", str(error), output.USAGE)
    except Exception as error:
        if options.verbose:
            raise
        return output.fail("graph-check", _explained(error), output.PROBLEMS)
    if options.json != output.STDOUT:
        print(counting.table(result))
        print()
        print(counting.conclusion(result), flush=True)
    output.write_json(result, options.json)
    return 1 if result["findings"] else 0


def _explained(error: Exception) -> str:
    if type(error).__name__ == _REFUSAL:
        return f"the card would refuse this: {in_one_line(error)}"
    return f"{type(error).__name__}: {in_one_line(error)} (--verbose shows where)"


def log(text: str) -> None:
    print(f"graph-check: {text}", file=sys.stderr, flush=True)


def check(options: argparse.Namespace) -> dict[str, Any]:
    log(f"loading {options.model or 'the demo model'}, and capturing all graphs")
    llm = open_engine(options)
    limits, text = limits_and_text(llm, options)
    warm = report(llm)
    phases = {}
    traffic = {"requests": 0, "aborted": 0, "tokens": 0}
    meter = counting.Meter(warm)
    for title, items in (
        ("mixed", mixed(options.requests, options.seed, text, limits)),
        ("prompt log-probabilities", with_prompt_logprobs(options.seed, text, limits)),
    ):
        log(f"{len(items)} requests ({title})")
        meter = counting.Meter(meter.last)
        with counting_requests(f"requests ({title})", len(items)) as more:
            for name, count in drive(llm, items, look_with(meter, llm), more).items():
                traffic[name] += count
        phases[title] = counting.phase(meter).as_dict()
    result = {
        **describe(llm, options),
        "traffic": traffic,
        "graphs": counting.graphs(warm, meter.last),
        "phases": phases,
    }
    result["findings"] = counting.findings(result)
    return result


def open_engine(options: argparse.Namespace) -> LLM:
    try:
        from vllm import LLM

        from vllm_gaudi_spec.devices import load_backend
        from vllm_gaudi_spec.platforms.base import is_active
        from vllm_gaudi_spec.tools.demo_model import DemoModelError, demo_model_path
    except ImportError as error:
        if options.verbose:
            raise
        raise WrongOptions(f"vLLM does not load here: {in_one_line(error)}; run `make setup`") from error
    if not is_active():
        raise WrongOptions("vLLM runs on another platform plugin; unset VLLM_PLUGINS, or set it to gaudi_spec")
    blocks = max(options.max_num_seqs, 4) * -(-options.max_model_len // load_backend().traits.block_size)
    try:
        return LLM(
            model=options.model or demo_model_path(),
            speculative_config=options.speculative_config,
            additional_config=options.additional_config or {},
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            dtype=options.dtype,
            seed=options.seed,
            # A card's KV cache would not fit into the memory of an emulated card's host.
            num_gpu_blocks_override=1 + blocks,
        )
    except (DemoModelError, ValueError, OSError) as error:
        # What vLLM and we refuse at start-up, and models that are not there.
        if options.verbose:
            raise
        raise WrongOptions(in_one_line(error)) from error


def limits_and_text(llm: LLM, options: argparse.Namespace) -> tuple[Limits, list[int]]:
    tokenizer = llm.get_tokenizer()
    vocab = min(len(tokenizer), llm.llm_engine.model_config.get_vocab_size())
    limits = Limits(vocab, options.max_model_len, options.max_num_seqs)
    return limits, tokenizer.encode(TEXT, add_special_tokens=False)


def report(llm: LLM) -> dict[str, Any]:
    answer: dict[str, Any] = llm.collective_rpc("step_report")[0]
    return answer


def look_with(meter: counting.Meter, llm: LLM) -> Callable[[], None]:
    return lambda: meter.look(report(llm))


def drive(llm: LLM, items: list[Item], look: Callable[[], None], more: Callable[[int], None]) -> dict[str, int]:
    """Each request comes and leaves at its step; pauses without work are skipped. `more` is called with
    the number of those that ended."""
    engine = llm.llm_engine
    waiting = sorted(items, key=lambda item: item.arrives)[::-1]
    leaving: dict[str, int] = {}
    tick = num_steps = num_aborted = num_tokens = 0
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            tick = max(tick, waiting[-1].arrives)
        while waiting and waiting[-1].arrives <= tick:
            item = waiting.pop()
            engine.add_request(item.name, {"prompt_token_ids": list(item.prompt)}, sampling_params(item.params))
            if item.leaves_after is not None:
                leaving[item.name] = tick + item.leaves_after
        if gone := [name for name, when in leaving.items() if when <= tick]:
            engine.abort_request(gone)
            num_aborted += len(gone)
            more(len(gone))
            for name in gone:
                del leaving[name]
        for answer in engine.step():
            if answer.finished:
                num_tokens += sum(len(completion.token_ids) for completion in answer.outputs)
                leaving.pop(answer.request_id, None)
                more(1)
        tick += 1
        num_steps += 1
        if num_steps % _LOOK_EVERY == 0:
            look()
    look()
    return {"requests": len(items), "aborted": num_aborted, "tokens": num_tokens}


def sampling_params(params: dict[str, Any]) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    rest = dict(params)
    if choice := rest.pop("choice", None):
        rest["structured_outputs"] = StructuredOutputsParams(choice=choice)
    return SamplingParams(**rest)


def describe(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    from vllm_gaudi_spec.devices import describe_device

    spec_config = options.speculative_config
    k = (spec_config or {}).get("num_speculative_tokens")
    speculation = f"{spec_config.get('method', 'draft_model')}, k = {k}" if spec_config else "none"
    settings = {
        "model": options.model or "the demo model",
        "speculation": speculation,
        **{
            name: getattr(options, name) for name in ("max_model_len", "max_num_seqs", "requests", "seed", "host_syncs")
        },
        "speculative_config": spec_config,
        "additional_config": options.additional_config,
    }
    dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    return {**describe_device(), "dtype": dtype, "settings": settings}


# ---- the workload: the same for the same seed, whatever device runs it ------------------------------------


# All kinds of sampling that may need another graph; each request has one. Token ids are put in by `_fit_ids`.
KINDS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0, ignore_eos=True),
    dict(temperature=0.8, top_k=20),
    dict(temperature=1.0, ignore_eos=True),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=0.0, logprobs=3),
    dict(temperature=0.0, extra_args={"num_speculative_tokens": 0}),
    dict(temperature=1.3, min_p=0.05),
    dict(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5),
    dict(temperature=0.7, top_k=40, top_p=0.8, min_p=0.02),
    dict(temperature=1.0, stop=[".", "e"]),
    dict(temperature=0.9, repetition_penalty=1.3, top_k=300),
    dict(temperature=0.0, logit_bias=(5, 9, 77)),
    dict(temperature=1.0, logprobs=0, top_p=0.95),
    dict(temperature=0.0, bad_words=["the", " a"], ignore_eos=True),
    dict(temperature=1.0, extra_args={"num_speculative_tokens": 1}, top_k=50),
    dict(temperature=1.0, allowed_token_ids=tuple(range(20, 120)), min_tokens=4),
    dict(temperature=0.9, n=2),
    dict(temperature=1.0, stop_token_ids=tuple(range(30, 60)), min_tokens=3),
    dict(temperature=1.0, extra_args={"num_speculative_tokens": 0}, frequency_penalty=0.5, logprobs=2),
    dict(temperature=0.0, choice=["yes", "no", "perhaps"]),
)
PROMPT_LOGPROBS = (0, 1, 5)
LONGEST_ANSWER = 40
# More than a block of KV, so that requests which begin alike share one.
_SHARED = 150

TEXT = """The harbour was quiet in the morning. Boats lay side by side along the wall, and nets hung over the rail to
dry. A woman counted crates: one of herring, two of mackerel, three of cod. She wrote each number into a small
book, and read it again. one, two, three, four, five, six, seven, eight, nine, ten, one, two, three, four, five.
def add(left: int, right: int) -> int:
    return left + right
{"name": "Ada", "age": 36, "city": "London"} {"name": "Alan", "age": 41, "city": "Wilmslow"}
Die Boote lagen still, und niemand sprach. Le vent venait de la mer. 12 * 12 = 144; 13 * 13 = 169; 14 * 14 = 196.
When the bell rang she closed the book, and when the bell rang again she opened it, and counted the crates again.
"""


@dataclass(frozen=True)
class Item:
    """A request, the step at which it arrives, and the number of steps after which its client leaves."""

    name: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    arrives: int
    leaves_after: int | None = None


@dataclass(frozen=True)
class Limits:
    vocab: int
    max_model_len: int
    max_num_seqs: int


def mixed(count: int, seed: int, text: Sequence[int], limits: Limits) -> list[Item]:
    """Return the mixed workload; `text` is TEXT in the model's vocabulary."""
    rng = random.Random(seed)
    kinds = _kinds(count, rng)
    arrivals = _arrivals(count, rng, limits.max_num_seqs)
    shared = _prompt(rng, _SHARED, text, limits.vocab)
    items = []
    for index, (kind, arrives) in enumerate(zip(kinds, arrivals, strict=True)):
        answer = max(rng.randint(1, LONGEST_ANSWER), kind.get("min_tokens", 0))
        prompt = _prompt(rng, _length(rng, limits.max_model_len - answer), text, limits.vocab)
        if index % 3 == 2 and limits.max_model_len > _SHARED + LONGEST_ANSWER + 64:
            prompt = (shared + prompt)[: max(len(prompt), _SHARED + 10)]
        if index == count // 2:
            # One that stops at the end of the context only, where drafts have to become fewer.
            kind = KINDS[0]
            answer = min(12, limits.max_model_len // 2)
            prompt = _prompt(rng, limits.max_model_len - answer, text, limits.vocab)
        leaves = rng.randint(2, 8) if index % 9 == 4 else None
        params = _fit_ids(kind, limits.vocab) | {"max_tokens": answer}
        if params["temperature"] > 0:
            params["seed"] = 1000 + index
        items.append(Item(f"mixed-{index}", prompt, params, arrives, leaves))
    return items


def with_prompt_logprobs(seed: int, text: Sequence[int], limits: Limits) -> list[Item]:
    """Return requests for prompt log-probabilities, and one without."""
    rng = random.Random(seed + 1)
    wishes = [{"prompt_logprobs": wish} for wish in PROMPT_LOGPROBS]
    items = []
    for index, wish in enumerate([*wishes, {}]):
        prompt = _prompt(rng, _length(rng, limits.max_model_len - 6), text, limits.vocab)
        params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **wish}
        items.append(Item(f"prompt-logprobs-{index}", prompt, params, 2 * index))
    return items


def _kinds(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return the kinds in random order, each once before any repeats."""
    kinds: list[dict[str, Any]] = []
    while len(kinds) < count:
        kinds += rng.sample(KINDS, len(KINDS))
    return kinds[:count]


def _arrivals(count: int, rng: random.Random, max_num_seqs: int) -> list[int]:
    """Return arrivals in waves, some larger than the batch, with pauses in which the batch drains."""
    arrivals: list[int] = []
    tick = 0
    while len(arrivals) < count:
        wave = rng.choice((1, 2, max_num_seqs, max_num_seqs + 2))
        for _ in range(min(wave, count - len(arrivals))):
            arrivals.append(tick)
            tick += rng.choice((0, 0, 1, 3))
        tick += rng.choice((4, 12, 30))
    return arrivals


def _length(rng: random.Random, longest: int) -> int:
    """Draw a length from a logarithmic distribution."""
    return max(1, min(longest, round(2 ** rng.uniform(0, longest.bit_length()))))


def _prompt(rng: random.Random, length: int, text: Sequence[int], vocab: int) -> tuple[int, ...]:
    style = rng.choice(("text", "text", "repeated", "any"))
    if style == "any":
        return tuple(rng.randrange(vocab) for _ in range(length))
    begin = rng.randrange(len(text))
    passage = [*text[begin:], *text[:begin]]
    if style == "repeated":  # what n-gram drafters find
        passage = passage[: rng.randint(4, 24)]
    return tuple((passage * (length // len(passage) + 1))[:length])


def _fit_ids(kind: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Map the token ids of the parameters into this vocabulary."""
    params = dict(kind)
    for name in ("allowed_token_ids", "stop_token_ids"):
        if name in params:
            params[name] = sorted({token % vocab for token in params[name]})
    if "logit_bias" in params:
        ids = (token % vocab for token in params["logit_bias"])
        params["logit_bias"] = dict(zip(ids, (4.0, -100.0, 2.5), strict=True))
    return params


if __name__ == "__main__":
    sys.exit(main())
