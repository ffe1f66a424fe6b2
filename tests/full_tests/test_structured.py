"""A structured-output request that ends by itself always parses: alone among others, and under preemption."""

from typing import Any

import pytest

from tests.full_tests.engines import engine
from tests.full_tests.structured import ask_mixed, check_ended


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), dict(max_num_batched_tokens=64)],
    ids=["whole", "chunked"],
)
def test_ended_requests_parse(options: dict[str, Any], demo_model: str) -> None:
    with engine(demo_model, max_num_seqs=32, kv_cache_memory_bytes=256 << 20, **options) as llm:
        ended = check_ended(ask_mixed(llm, demo_model, 36))
    assert all(count >= 3 for kind, count in ended.items() if kind != "json_object"), ended
