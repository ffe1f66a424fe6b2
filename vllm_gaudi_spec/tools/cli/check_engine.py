"""The engine part of graph-check, in a process whose environment `graph_check.command` has set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.tools.cli import counting, make_parser, output, summary, workload
from vllm_gaudi_spec.tools.io import output_files
from vllm_gaudi_spec.tools.io.terminal import counting as counting_requests

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

# Engine steps between two reads of the counters.
_LOOK_EVERY = 1000
# The emulated card's error where a real one would fail.
_REFUSAL = "DeviceRefusal"


class WrongOptions(Exception):
    """The message names them, and the remedy."""


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
    if options.json != output_files.STDOUT:
        print(summary.table(result))
        print()
        print(summary.conclusion(result), flush=True)
    output_files.write_json(result, options.json)
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
        ("mixed", workload.mixed(options.requests, options.seed, text, limits)),
        ("prompt log-probabilities", workload.with_prompt_logprobs(options.seed, text, limits)),
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
    result["findings"] = summary.findings(result)
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


def limits_and_text(llm: LLM, options: argparse.Namespace) -> tuple[workload.Limits, list[int]]:
    tokenizer = llm.get_tokenizer()
    vocab = min(len(tokenizer), llm.llm_engine.model_config.get_vocab_size())
    limits = workload.Limits(vocab, options.max_model_len, options.max_num_seqs)
    return limits, tokenizer.encode(workload.TEXT, add_special_tokens=False)


def report(llm: LLM) -> dict[str, Any]:
    answer: dict[str, Any] = llm.collective_rpc("step_report")[0]
    return answer


def look_with(meter: counting.Meter, llm: LLM) -> Callable[[], None]:
    return lambda: meter.look(report(llm))


def drive(
    llm: LLM, items: list[workload.Item], look: Callable[[], None], more: Callable[[int], None]
) -> dict[str, int]:
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


if __name__ == "__main__":
    sys.exit(main())
