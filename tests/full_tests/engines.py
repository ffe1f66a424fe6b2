"""One way to open an engine in this process, and to close it so that the next one can open."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm import LLM, AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

KV_CACHE_BYTES = 64 << 20
# So little that a busy engine has to preempt
SMALL_KV = dict(kv_cache_memory_bytes=1 << 20, block_size=32)

DEFAULTS: dict[str, Any] = dict(
    dtype="float32",
    kv_cache_memory_bytes=KV_CACHE_BYTES,
    max_model_len=512,
    max_num_seqs=64,
    enforce_eager=True,
    disable_log_stats=False,
    seed=0,
)


@contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    """An engine in float32 with a small KV cache; `options` are vLLM's own and win over the defaults here.

    Engines in one process share vLLM's distributed groups, so only one may be open at a time.
    On our platform, leaving the block checks that warm-up had seen every step signature.
    """
    # vLLM collects garbage many times while an engine starts and ends. Those runs skip what is frozen, and vLLM thaws
    # it at the end.
    gc.collect()
    gc.freeze()
    llm = LLM(model, **(DEFAULTS | options))
    try:
        yield llm
        if type(current_platform).__module__.startswith("vllm_gaudi_spec"):
            check_reports(llm.collective_rpc("step_report"))
    finally:
        llm.llm_engine.engine_core.shutdown()


def check_reports(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        new = report["graphs"]["after_warmup"]
        assert new == 0, f"rank {rank}: {new} step signatures appeared after warm-up: {report}"
        compiled = report["device"].get("compiled_after_warmup", 0)
        assert compiled == 0, f"rank {rank}: the device compiled {compiled} programs after warm-up"


def by_label(llm: LLM, name: str, label: str) -> dict[str, int]:
    found = {metric.labels[label]: int(metric.value) for metric in llm.get_metrics() if metric.name == name}
    assert found, f"no metric named {name}"
    return found


def counter(llm: LLM, name: str) -> int:
    """A counter of vLLM's metrics, summed over its labels."""
    values = [metric.value for metric in llm.get_metrics() if metric.name == name]
    assert values, f"no metric named {name}"
    return int(sum(values))


def preemptions(llm: LLM) -> int:
    return counter(llm, "vllm:num_preemptions")


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Token ids per request and, for n > 1, per completion."""
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def first_tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """Token ids of each request's only completion."""
    return [completions[0] for completions in tokens(outputs)]


class Job(NamedTuple):
    prompts: list[list[int]]
    params: list[SamplingParams]
    ranks: list[int]


def data_parallel(model: str, jobs: list[Job], num_ranks: int = 2, **options: Any) -> list[list[RequestOutput]]:
    """What data-parallel engines answer, as the server runs them: a process each, and a client before them. One job
    after the other. No step signature was new to any of them."""
    arguments = AsyncEngineArgs(model=model, data_parallel_size=num_ranks, **(DEFAULTS | options))
    return asyncio.run(_answers_of_ranks(arguments, jobs))


async def _answers_of_ranks(arguments: AsyncEngineArgs, jobs: list[Job]) -> list[list[RequestOutput]]:
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        answers = [await asyncio.gather(*_asked(llm, index, job)) for index, job in enumerate(jobs)]
        client = llm.engine_core
        # The public call answers for the first engine alone.
        calls = [
            client._call_utility_async("collective_rpc", "step_report", None, (), None, engine=one)
            for one in client.core_engines
        ]
        check_reports([report for reports in await asyncio.gather(*calls) for report in reports])
        return answers
    finally:
        llm.shutdown()


def _asked(llm: AsyncLLM, index: int, job: Job) -> Iterator[Any]:
    for place, (prompt, params, rank) in enumerate(zip(*job, strict=True)):
        yield _last(llm.generate({"prompt_token_ids": prompt}, params, f"{index}-{place}", data_parallel_rank=rank))


async def _last(outputs: Any) -> RequestOutput:
    async for output in outputs:
        newest: RequestOutput = output
    return newest
