"""The engine process of graph-check, whose environment `graph_check.start` has set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.tools.cli import make_parser
from vllm_gaudi_spec.tools.graph_check import counting
from vllm_gaudi_spec.tools.graph_check.workload import TEXT, Item, Limits, make_mixed, make_prompt_logprobs
from vllm_gaudi_spec.tools.io import output

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


# Number of engine steps after which the counters are read again. The emulated card keeps a limited number of steps.
_STEPS_BETWEEN_LOOKS = 1000


class WrongOptions(Exception):
    """Raised if the engine rejects the options. The message contains the reason and a remedy."""


def main() -> int:
    options = make_parser().parse_args()
    return output.guard("graph-check", lambda: check(options), verbose=options.verbose)


def check(options: argparse.Namespace) -> int:
    try:
        result = run_workload(options)
    except Exception as error:
        if options.verbose:
            raise
        if isinstance(error, WrongOptions):
            return output.fail("graph-check", str(error), output.USAGE)
        if type(error).__name__ == "DeviceRefusal":  # the emulated card raises this error where a real card would fail
            return output.fail("graph-check", f"the card would reject this: {in_one_line(error)}", output.PROBLEMS)
        message = f"{type(error).__name__}: {in_one_line(error)} (--verbose shows where)"
        return output.fail("graph-check", message, output.PROBLEMS)
    if options.json != output.STDOUT:
        print(f"{counting.make_table(result)}\n\n{counting.conclude(result)}", flush=True)
    output.write_json(result, options.json)
    return output.PROBLEMS if result["findings"] else output.FINE


def log(text: str) -> None:
    print(f"graph-check: {text}", file=sys.stderr, flush=True)


def run_workload(options: argparse.Namespace) -> dict[str, Any]:
    log(f"loading {options.model or 'the demo model'}, and capturing all graphs")
    llm = open_engine(options)
    tokenizer = llm.get_tokenizer()
    vocab = min(len(tokenizer), llm.llm_engine.model_config.get_vocab_size())
    limits = Limits(vocab, options.max_model_len, options.max_num_seqs)
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    warm = read_report(llm)
    phases = {}
    traffic = {"requests": 0, "aborted": 0, "tokens": 0}
    meter = counting.Meter(warm)
    for title, items in (
        ("mixed", make_mixed(options.requests, options.seed, text, limits)),
        ("prompt log-probabilities", make_prompt_logprobs(options.seed, text, limits)),
    ):
        log(f"{len(items)} requests ({title})")
        meter = counting.Meter(meter.last)
        with output.counting(f"requests ({title})", len(items)) as count:
            for name, number in drive(llm, items, meter, count).items():
                traffic[name] += number
        phases[title] = counting.count_phase(meter)
    result = {
        **describe(llm, options),
        "traffic": traffic,
        "graphs": counting.count_graphs(warm, meter.last),
        "phases": phases,
    }
    return result | {"findings": counting.find_faults(result)}


def open_engine(options: argparse.Namespace) -> LLM:
    try:
        from vllm import LLM

        from vllm_gaudi_spec.device_table import load_backend
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
            # A KV cache sized for a card would not fit in the memory of an emulated card's host.
            num_gpu_blocks_override=1 + blocks,
        )
    except (DemoModelError, ValueError, OSError) as error:  # vLLM or this plugin rejects them, or the model is missing
        if options.verbose:
            raise
        raise WrongOptions(in_one_line(error)) from error


def read_report(llm: LLM) -> dict[str, Any]:
    report: dict[str, Any] = llm.collective_rpc("step_report")[0]
    return report


def drive(llm: LLM, items: list[Item], meter: counting.Meter, count: Callable[[int], None]) -> dict[str, int]:
    """Run the requests, each arriving (and possibly aborted) at its own step. Steps without requests are skipped."""
    engine = llm.llm_engine
    waiting = sorted(items, key=lambda item: item.arrives)[::-1]
    leaving: dict[str, int] = {}
    tick = num_steps = num_aborted = num_tokens = 0
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            tick = max(tick, waiting[-1].arrives)
        while waiting and waiting[-1].arrives <= tick:
            item = waiting.pop()
            engine.add_request(item.name, {"prompt_token_ids": list(item.prompt)}, make_sampling_params(item.params))
            if item.leaves_after is not None:
                leaving[item.name] = tick + item.leaves_after
        if gone := [name for name, when in leaving.items() if when <= tick]:
            engine.abort_request(gone)
            num_aborted += len(gone)
            count(len(gone))
            for name in gone:
                del leaving[name]
        for answer in engine.step():
            if answer.finished:
                num_tokens += sum(len(completion.token_ids) for completion in answer.outputs)
                leaving.pop(answer.request_id, None)
                count(1)
        tick += 1
        num_steps += 1
        if num_steps % _STEPS_BETWEEN_LOOKS == 0:
            meter.look(read_report(llm))
    meter.look(read_report(llm))
    return {"requests": len(items), "aborted": num_aborted, "tokens": num_tokens}


def make_sampling_params(params: dict[str, Any]) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = dict(params)
    if choice := params.pop("choice", None):
        params["structured_outputs"] = StructuredOutputsParams(choice=choice)
    return SamplingParams(**params)


def describe(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    from vllm_gaudi_spec.device_table import describe_device

    config = options.speculative_config
    settings = {
        "model": options.model or "the demo model",
        "speculation": f"{config.get('method', 'draft_model')}, k = {config.get('num_speculative_tokens')}"
        if config
        else "none",
        **{
            name: getattr(options, name) for name in ("max_model_len", "max_num_seqs", "requests", "seed", "host_syncs")
        },
        "speculative_config": config,
        "additional_config": options.additional_config,
    }
    dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    return {**describe_device(), "dtype": dtype, "settings": settings}


if __name__ == "__main__":
    sys.exit(main())
