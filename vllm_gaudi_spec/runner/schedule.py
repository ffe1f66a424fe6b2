"""From the scheduler's word to batches: who decodes, who prefills, in which rectangles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_spec.runner.batch import Batch, make_batch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_gaudi_spec.runner.requests import Request, Requests
    from vllm_gaudi_spec.runner.shapes import Shapes


def plan_batches(scheduled: SchedulerOutput, requests: Requests, shapes: Shapes) -> list[Batch]:
    """Prompt chunks in the scheduler's order, then all decodes as one rectangle.

    The order matters: a request admitted on a prefix-cache hit may read blocks that one before it writes in this
    very step, and one with a single token left is a decode that reads them too.
    """
    chunks: list[tuple[Request, int]] = []
    decodes: list[Request] = []
    for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
        request = requests.by_id[req_id]
        if request.num_computed >= len(request.known) - 1:
            decodes.append(request)
        else:
            chunks.append((request, num_tokens))
    batches = [_prefill_batch(group, requests, shapes) for group in _group(chunks, shapes)]
    if decodes:
        batches.append(_decode_batch(decodes, requests, shapes))
    return batches


def _group(chunks: list[tuple[Request, int]], shapes: Shapes) -> list[list[tuple[Request, int]]]:
    """Neighbours of one bucket share a step, as far as the shapes allow."""
    groups: list[list[tuple[Request, int]]] = []
    for request, length in chunks:
        if groups:
            longest = max(length, *(count for _, count in groups[-1]))
            if len(groups[-1]) < shapes.prefill_rows_at(longest):
                groups[-1].append((request, length))
                continue
        groups.append([(request, length)])
    return groups


def _prefill_batch(group: list[tuple[Request, int]], requests: Requests, shapes: Shapes) -> Batch:
    members = [request for request, _ in group]
    counts = [count for _, count in group]
    ends = [request.num_computed + count for request, count in group]
    finishes = [end == len(request.known) for end, request in zip(ends, members, strict=True)]
    # Every row is padded to the bucket, so the context is that of a row as long as the longest.
    end = max(request.num_computed for request in members) + max(counts)
    shape = shapes.prefill(len(members), max(counts), end)
    return make_batch(requests, shape, members, counts, finishes, starts_known=True)


def _decode_batch(members: list[Request], requests: Requests, shapes: Shapes) -> Batch:
    context = max(request.num_computed for request in members) + 1
    shape = shapes.decode(len(members), 1, context)
    ones = [1] * len(members)
    return make_batch(requests, shape, members, ones, [True] * len(members), starts_known=False)
