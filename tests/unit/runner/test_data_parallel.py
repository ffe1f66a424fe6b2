"""Data-parallel ranks that share experts run the same rectangles, whatever work each of them has."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.runner.test_shapes import shapes as make_shapes
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.records import DECODE, Planned, Request
from vllm_gaudi_spec.runner.extensions import data_parallel
from vllm_gaudi_spec.runner.extensions.data_parallel import DataParallelLockstep, Rectangle, merge_plans

DECODES = st.builds(Rectangle, st.just(1), st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 4)))
CHUNKS = st.builds(Rectangle, st.just(0), st.just(1), st.sampled_from((16, 32, 64)))
PLANS = st.lists(st.lists(st.one_of(DECODES, CHUNKS), max_size=6), min_size=1, max_size=4)


# The same examples in every run, and a slow machine is no failure.
@settings(deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS)
def test_merged_plans_keep_the_order_of_every_rank(plans: list[list[Rectangle]]) -> None:
    steps = merge_plans(plans)
    for rank, plan in enumerate(plans):
        own = [step.rectangle for step in steps if rank in step.ranks]
        assert len(own) == len(plan)
        for one, wanted in zip(own, plan, strict=True):
            assert one.decodes == wanted.decodes
            assert (one.rows, one.queries) >= (wanted.rows, wanted.queries)
            assert one.queries >= wanted.queries
    assert all(step.ranks for step in steps), "a forward that nobody needs"
    assert len(steps) <= sum(map(len, plans))


def test_lockstep_shapes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shapes other ranks bring, this rank runs shapes that warm-up has run."""
    shapes = make_shapes(max_num_seqs=4, max_len=64, drafts=3, num_ranks=2, backend=load_backend())
    assert shapes.prefill_rows == (1,)
    here = DataParallelLockstep(shapes, max_forwards=5)
    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(data_parallel, "get_dp_group", lambda: group)
    listed = set(shapes.all())
    member: Any = Request(
        req_id="a", params=None, seed_words=(0, 0), prompt=[1] * 60, row=0, all_token_ids=[1] * 60, num_computed=60
    )
    own: dict[str, list[Planned]] = {
        "nothing": [],
        "a decode": [
            Planned(
                shape=shapes.decode(1, [61]), requests=[member], starts=[60], counts=[1], ends=[61], finishes=[True]
            )
        ],
        "a chunk": [
            Planned(
                shape=shapes.prefill(1, 5, 65), requests=[member], starts=[60], counts=[5], ends=[65], finishes=[False]
            )
        ],
    }
    for mine in own.values():
        ours = [Rectangle(int(b.shape.phase == DECODE), b.shape.rows, b.shape.queries) for b in mine]
        for shape in listed:
            theirs = [Rectangle(int(shape.phase == DECODE), shape.rows, shape.queries)]
            for rank, plans in enumerate(([ours, theirs], [theirs, ours])):
                group.rank_in_group = rank
                monkeypatch.setattr(here, "_exchange", lambda own, plans=plans: plans)
                fitted = here.fit(mine)
                assert [batch.shape.tokens for batch in fitted] == [
                    step.rectangle.rows * step.rectangle.queries for step in merge_plans(plans)
                ]
                assert {batch.shape for batch in fitted} <= listed
                assert [batch.requests for batch in fitted if batch.requests] == [batch.requests for batch in mine]
                assert [batch.counts for batch in fitted if batch.requests] == [batch.counts for batch in mine]
