"""From the scheduler's word to batches: who decodes, who prefills, in which rectangles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_spec.records import Planned

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_gaudi_spec.records import Request
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes


def plan_batches(
    scheduled: SchedulerOutput, requests: Requests, shapes: Shapes, num_drafts: dict[str, int]
) -> list[Planned]:
    """Running decodes as one rectangle, then everything else in the scheduler's order.

    `num_drafts`: the most drafts of a request that this step may verify; a request that is not in it has none.

    The order matters: a request admitted on a prefix-cache hit may read blocks that are written in this very step, by a
    decode that fills its block or by a prompt chunk admitted before it. One with a single token left is a decode too,
    but keeps its place among the chunks.
    """
    running: list[Request] = []
    groups: list[list[tuple[Request, int]]] = []
    for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
        request = requests.by_id[req_id]
        if request.num_computed >= len(request.known):
            running.append(request)
        elif groups and _fits(groups[-1], request, num_tokens, shapes):
            groups[-1].append((request, num_tokens))
        else:
            groups.append([(request, num_tokens)])
    batches = [_decode_batch(running, shapes, num_drafts)] if running else []
    for group in groups:
        if _is_last_token(group[0][0]):
            # It was just admitted, so what was scheduled beside its token is padding.
            batches.append(_decode_batch([request for request, _ in group], shapes, {}))
        else:
            batches.append(_prefill_batch(group, shapes))
    return batches


def _is_last_token(request: Request) -> bool:
    return request.num_computed == len(request.known) - 1


def _fits(group: list[tuple[Request, int]], request: Request, num_tokens: int, shapes: Shapes) -> bool:
    """Whether a request may share the rectangle of the ones before it: of its kind, and small enough."""
    if _is_last_token(group[0][0]) or _is_last_token(request):
        return _is_last_token(group[0][0]) and _is_last_token(request)
    longest = max(num_tokens, *(count for _, count in group))
    return len(group) < shapes.prefill_rows_at(longest)


def _prefill_batch(group: list[tuple[Request, int]], shapes: Shapes) -> Planned:
    members = [request for request, _ in group]
    counts = [count for _, count in group]
    ends = [request.num_computed + count for request, count in group]
    finishes = [end == len(request.known) for end, request in zip(ends, members, strict=True)]
    # Every row is padded to the bucket, so the context is that of a row as long as the longest.
    end = max(request.num_computed for request in members) + max(counts)
    shape = shapes.prefill(len(members), max(counts), end)
    return Planned(shape=shape, requests=members, counts=counts, finishes=finishes)


def _decode_batch(members: list[Request], shapes: Shapes, num_drafts: dict[str, int]) -> Planned:
    counts = [1 + num_drafts.get(request.req_id, 0) for request in members]
    num_queries = shapes.decode_queries[0] if max(counts) == 1 else shapes.decode_queries[-1]
    shape = shapes.decode(num_queries, [request.num_computed + num_queries for request in members])
    return Planned(shape=shape, requests=members, counts=counts, finishes=[True] * len(members))
