"""One case of `choose_speculation`, in a process of its own: an engine with one drafter, asked and timed.

python -m vllm_gaudi_spec.tools.tune.case TASK.json ANSWER.json
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.tools.tune import acceptance, costs
from vllm_gaudi_spec.tools.tune.child import serve
from vllm_gaudi_spec.tools.tune.options import engine_options

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_gaudi_spec.runner.model_runner import ModelRunner

_WARMUP_TOKENS = 16


@contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    from vllm import LLM

    llm = LLM(model, **({"enable_prefix_caching": False} | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def run(task: dict[str, Any]) -> dict[str, Any]:
    """`asked`: numbers of drafts to measure acceptance for; `batches`: batch sizes to time, at the drafter's k.
    `speculative`: none for an engine without a drafter."""
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(task["model"])
    prompts = [tokenizer.encode(text) for text in task["prompts"]]
    longest = max(map(len, prompts))
    speculative, temperature = task["speculative"], task["temperature"]
    num_drafts = speculative["num_speculative_tokens"] if speculative else 0
    defaults = dict(
        speculative_config=speculative,
        max_num_seqs=task["max_num_seqs"],
        max_model_len=longest + max(task["tokens"], costs.MAX_TIMED_TOKENS) + 1,
        **({"per_request_spec_decode_metrics": "detailed"} if speculative else {}),
    )
    with engine(task["model"], **engine_options(defaults, task["engine"])) as llm:
        for drafts in {0, num_drafts}:
            acceptance.ask(llm, prompts[:2], _WARMUP_TOKENS, drafts, temperature)
        accepted = {
            drafts: acceptance.measure(llm, prompts, task["tokens"], drafts, temperature) for drafts in task["asked"]
        }
        timed = []
        if task["batches"]:
            clock = _runner(llm).observer = costs.Clock()
            timed = [
                costs.measure(llm, clock, prompts, num_drafts, batch, task["turns"], temperature)
                for batch in task["batches"]
            ]
    return {
        "context": round(sum(map(len, prompts)) / len(prompts) + task["tokens"] / 2),
        "acceptance": {drafts: [asdict(counts) for counts in found.requests] for drafts, found in accepted.items()},
        "costs": [asdict(cost) for cost in timed],
    }


def _runner(llm: LLM) -> ModelRunner:
    try:
        core: Any = llm.llm_engine.engine_core
        runner: ModelRunner = core.engine_core.model_executor.driver_worker.worker.model_runner
    except AttributeError:
        raise ValueError(
            "steps are timed in the engine's own process, which has no worker here: leave out tensor parallelism"
        ) from None
    return runner


if __name__ == "__main__":
    serve(run)
