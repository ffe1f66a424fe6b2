"""Two pipeline stages say what one rank says, without drafts and with each drafter that the last stage may have.

Prompts are longer than a step's token budget, so both stages have work at the same time, and chunks of a prompt follow
each other through the stages.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.full_tests.engines import engine, first_tokens, generate, preemptions
from tests.full_tests.equality import Tally
from tests.full_tests.ranks import histories
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import speculating
from tests.full_tests.test_distributed import (
    NOISE,
    SIZES,
    Said,
    Setup,
    check,
    deepseek,
    even,
    said,
    setup_of,
)
from tests.support.marks import quick_and_slow

__all__ = ["deepseek", "even", "said", "setup_of"]  # fixtures

TWO: dict[str, Any] = dict(pipeline_parallel_size=2, **SIZES)
METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle")


def layers_of(worker: Any) -> tuple[int, bool]:
    """Return how many KV caches a rank has, and whether it has a drafter with weights."""
    runner = worker.model_runner
    return len(runner.kv_cache.by_layer), runner.drafter is not None


@pytest.mark.slow
def test_without_drafts(looping_llama: str, said: Said) -> None:
    with engine(looping_llama, **TWO) as llm:
        outputs = first_tokens(generate(llm, *NOISE))
        assert llm.collective_rpc(layers_of) == [(1, False), (1, False)]
    tally, reference = Tally(), Reference(looping_llama)
    for index, (output, other) in enumerate(zip(outputs, said(looping_llama, NOISE), strict=True)):
        tally.compare(
            f"request {index}",
            output,
            other,
            lambda place, index=index, other=other: reference.scores(
                NOISE.prompts[index] + other[:place], NOISE.params[index]
            ),
        )
    tally.check()


@pytest.mark.parametrize("method", quick_and_slow(["draft_model"], METHODS))
def test_drafters_on_the_last_stage(method: str, setup_of: Callable[[str], Setup], said: Said) -> None:
    given = setup_of(method)
    with speculating(given.target, given.drafter, **TWO, **given.options) as llm:
        outputs = generate(llm, *given.work)
        (_, early_drafts), (_, last_drafts) = llm.collective_rpc(layers_of)
        assert not early_drafts
        assert last_drafts == (method in ("draft_model", "eagle"))
    check(given, outputs, said, f"PP 2, {method}")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "size"), [("ngram", None), ("draft_model", 1), ("draft_model", 2), ("eagle", 2)])
def test_two_stages_of_two_ranks(method: str, size: int | None, setup_of: Callable[[str], Setup], said: Said) -> None:
    """`size`: over how many of the last stage's ranks the drafter is cut."""
    given = setup_of(method)
    alone = {} if size is None else dict(draft_tensor_parallel_size=size)
    with speculating(given.target, given.drafter | alone, tensor_parallel_size=2, **TWO) as llm:
        outputs = generate(llm, *given.work)
        ranks = llm.collective_rpc(histories)
        assert ranks[0] == ranks[1]
        assert ranks[2] == ranks[3]
        assert any(map(any, ranks[0]))
    check(given, outputs, said, f"PP 2 x TP 2, {method}, drafter TP {size}")


@pytest.mark.slow
def test_preempted_requests(setup_of: Callable[[str], Setup], said: Said) -> None:
    """A request is preempted while its step is in flight."""
    given = setup_of("draft_model")
    scarce = dict(num_gpu_blocks_override=30, block_size=32)
    with speculating(given.target, given.drafter, **TWO, **scarce) as llm:
        outputs = generate(llm, *given.work)
        assert preemptions(llm) > 0
    check(given, outputs, said, "PP 2, preempted")
