"""Engines that draft, and what they drafted for each request."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from vllm import LLM, RequestOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tests.full_tests.engines import counter, engine

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": dict(draft_sample_method="coupled", rejection_sample_method="strict"),
    "standard": dict(draft_sample_method="probabilistic", rejection_sample_method="standard"),
    "block": dict(draft_sample_method="probabilistic", rejection_sample_method="block"),
}
"""Ways to sample drafts and to accept them."""


def ngram(k: int = 3, lookup: tuple[int, int] = (1, 4), **options: Any) -> dict[str, Any]:
    """Eager to draft: one token seen before is enough."""
    shortest, longest = lookup
    return dict(
        method="ngram", num_speculative_tokens=k, prompt_lookup_min=shortest, prompt_lookup_max=longest, **options
    )


def suffix(k: int = 3, **options: Any) -> dict[str, Any]:
    return dict(method="suffix", num_speculative_tokens=k, **options)


METHODS = {"ngram": ngram, "suffix": suffix}


def custom(name: str, k: int = 3, **options: Any) -> dict[str, Any]:
    model = f"tests.full_tests.drafters.{name}"
    return dict(method="custom_class", model=model, num_speculative_tokens=k, **options)


@contextmanager
def speculating(model: str, speculative_config: dict[str, Any], **options: Any) -> Iterator[LLM]:
    """An engine that drafts and keeps account of it, request by request and step by step."""
    accounts = dict(speculative_config=speculative_config, per_request_spec_decode_metrics="detailed")
    with engine(model, **accounts, **options) as llm:
        yield llm


class Account(NamedTuple):
    """The steps of one completion that had something scheduled to verify."""

    drafted: list[int]
    accepted: list[int]


def account(output: RequestOutput, completion: int = 0) -> Account:
    metrics = output.outputs[completion].spec_decode_metrics
    if metrics is None:
        return Account([], [])
    assert sum(metrics.per_step_drafted) == metrics.num_draft_tokens
    return Account(list(metrics.per_step_drafted), list(metrics.per_step_accepted))


def accounts(outputs: list[RequestOutput]) -> list[Account]:
    """Of every completion, n > 1 included."""
    return [account(output, index) for output in outputs for index in range(len(output.outputs))]


def accepted(llm: LLM) -> int:
    return counter(llm, "vllm:spec_decode_num_accepted_tokens")


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """Return what fills with the drafts for each text, where steps do not overlap."""
    found: dict[tuple[int, ...], list[int]] = {}
    update = Scheduler.update_draft_token_ids

    def record(scheduler: Scheduler, taken: Any) -> None:
        for name, tokens in zip(taken.req_ids, taken.draft_token_ids, strict=True):
            if tokens and name in scheduler.requests:
                found[tuple(scheduler.requests[name].all_token_ids)] = list(tokens)
        update(scheduler, taken)

    monkeypatch.setattr(Scheduler, "update_draft_token_ids", record)
    return found
