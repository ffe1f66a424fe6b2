"""Scripted schedulers instead of mocks: vLLM's records, made by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as trees
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.devices.base import DeviceTraits, Graphs, Memory
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.records import Batch, Verification
from vllm_gaudi_spec.runner.planning import plan_batches
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.sampling.params import Sampling
from vllm_gaudi_spec.sampling.rules.registry import TORCH


def batches_of(
    scheduled: SpecSchedulerOutput, requests: Requests, shapes: Shapes, num_drafts: dict[str, int] | None = None
) -> list[Batch]:
    return [requests.make_batch(one) for one in plan_batches(scheduled, requests, shapes, num_drafts or {})]


def make_speculation(num_drafts: int, drafter_max_len: int | None = None, **options: Any) -> Speculation:
    """Return a configuration of n-grams under the strict rule, changed by `options`."""
    ngram = dict(method="ngram", rule="strict", drafting="greedy")
    return Speculation(num_drafts=num_drafts, drafter_max_len=drafter_max_len, **(ngram | options))


class HostBackend:
    """A minimal device for the runner's bookkeeping."""

    traits = DeviceTraits(name="small", mode="eager", torch_device=torch.device("cpu"))
    rules = TORCH
    row_operations = row_operations.TORCH

    def __init__(self) -> None:
        self.memory: Memory = CopyingMemory()
        self.graphs = Graphs()


class CopyingMemory(Memory):
    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_host_syncs += 1
        return tensor.clone()

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        copy = self.download(tensor)
        return lambda: copy

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()


class CapturingBackend(HostBackend):
    traits = replace(HostBackend.traits, captures=True, slice_tokens=8, decode_step=1)

    def __init__(self) -> None:
        super().__init__()
        self.graphs = CapturingGraphs()


class CompilingBackend(CapturingBackend):
    traits = replace(CapturingBackend.traits, compiles=True, flat_decode=True, decode_step=0)


class CapturingGraphs(Graphs):
    """Graphs as strict as the contract of `Graphs.graph`.

    Arguments are of few kinds, each set of shapes and static values has one graph, and a graph's next run overwrites
    its result.
    """

    def graph(self, function: Any) -> Any:
        results: dict[Any, Any] = {}

        def run(*args: Any, **named: Any) -> Any:
            leaves, tree = trees.tree_flatten((args, named))
            kinds = {torch.Tensor, int, float, bool, str, type(None)}
            assert {type(leaf) for leaf in leaves} <= kinds, {type(leaf) for leaf in leaves} - kinds
            graph = str(tree), *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves)
            result, form = trees.tree_flatten(function(*args, **named))
            if graph not in results:
                results[graph] = [value.clone() if isinstance(value, torch.Tensor) else value for value in result]
            for static, value in zip(results[graph], result, strict=True):
                if isinstance(value, torch.Tensor):
                    static.copy_(value)
                else:
                    assert static == value, "a graph returns the same non-tensor values in every run"
            return trees.tree_unflatten(results[graph], form)

        return run


def make_requests(backend: HostBackend | None = None, **options: Any) -> Requests:
    sizes = dict(max_rows=3, max_len=64, block_sizes=[16], max_context=64, seed=0)
    return Requests(backend or HostBackend(), **(sizes | options))


def make_sampling(backend: HostBackend | None = None, **options: Any) -> Sampling:
    sizes = dict(max_rows=4, vocab_size=100, max_logprobs=5, logprobs_mode="raw_logprobs")
    return Sampling(backend or HostBackend(), **(sizes | options))


def sampled(answers: list[list[int]], num_rows: int) -> Verification:
    """Return a verification in which each row sampled these tokens. Rows after them are padding."""
    tokens = torch.zeros(num_rows, max(map(len, answers)), dtype=torch.int32)
    counts = torch.ones(num_rows, dtype=torch.int32)
    for index, answer in enumerate(answers):
        tokens[index, : len(answer)], counts[index] = torch.tensor(answer), len(answer)
    return Verification(tokens, counts)


def new_request(
    req_id: str,
    prompt: list[int],
    blocks: list[int],
    *,
    num_computed: int = 0,
    prefill: list[int] | None = None,
    params: SamplingParams | None = None,
) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=params or SamplingParams(seed=1),
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=num_computed,
        lora_request=None,
        prefill_token_ids=prefill,
    )


def cached(
    num_computed: dict[str, int],
    *,
    blocks: dict[str, list[int]] | None = None,
    resumed: dict[str, list[int]] | None = None,
) -> CachedRequestData:
    """Return vLLM's record of cached requests. `resumed` maps a request to all its tokens."""
    resumed = resumed or {}
    new_blocks = [(blocks[req_id],) if blocks and req_id in blocks else None for req_id in num_computed]
    return CachedRequestData(
        req_ids=list(num_computed),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids=resumed,
        new_block_ids=new_blocks,
        num_computed_tokens=list(num_computed.values()),
        num_output_tokens=[0] * len(num_computed),
    )


def step(
    tokens: dict[str, int],
    *,
    new: list[NewRequestData] | None = None,
    running: CachedRequestData | None = None,
    finished: set[str] | None = None,
    preempted: set[str] | None = None,
) -> SpecSchedulerOutput:
    return SpecSchedulerOutput(
        scheduled_new_reqs=new or [],
        scheduled_cached_reqs=running or CachedRequestData.make_empty(),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=finished or set(),
        free_encoder_mm_hashes=[],
        preempted_req_ids=preempted or set(),
    )
