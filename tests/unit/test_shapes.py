"""The list of shapes is closed: whatever a scheduler may ask for is in it, and small."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_gaudi_spec.config import Options, UnsupportedConfigError
from vllm_gaudi_spec.runner.shapes import Shapes


def shapes(
    max_num_seqs: int = 64,
    max_tokens: int = 2048,
    max_len: int = 1024,
    exact: bool = True,
    drafts: int = 0,
    **options: object,
) -> Shapes:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens),
        model_config=SimpleNamespace(max_model_len=max_len),
    )
    backend = SimpleNamespace(
        name="small", exact_context_width=exact, prefill_growth=1.25, prefill_rows=(1,), max_drafts=8
    )
    return Shapes.from_config(config, Options(**options), backend, drafts)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("rows", [(1,), (1, 4)])
def test_every_reachable_shape_is_listed(exact: bool, drafts: int, rows: tuple[int, ...]) -> None:
    chosen = shapes(max_num_seqs=17, max_tokens=300, max_len=200, exact=exact, drafts=drafts, prefill_rows=rows)
    listed = set(chosen.all())
    for length in range(1, 201):
        for num in range(1, chosen.prefill_rows_at(length) + 1):
            for start in range(0, 201 - length, 7):
                shape = chosen.prefill(num, length, start + length)
                assert shape in listed
                assert shape.queries >= length
                assert shape.context >= start + shape.queries, "padding must stay inside the block table"
    for num in range(1, 18):
        for queries in chosen.decode_queries:
            assert chosen.decode(num, queries, 200) in listed


def test_padding_is_bounded() -> None:
    chosen = shapes(max_num_seqs=256, max_tokens=4096, max_len=4096)
    for num in range(1, 257):
        assert chosen.decode(num, 1, 1).rows <= max(num * 1.5, num + 1)
    for length in range(64, 4097):
        assert chosen.prefill(1, length, length).queries <= length * 1.25 + 16


def test_drafts_double_the_decode_shapes_whatever_their_number() -> None:
    def count(drafts: int) -> int:
        return sum(shape.phase == "decode" for shape in shapes(drafts=drafts).all())

    assert count(1) == count(3) == count(8) == 2 * count(0)


def test_buckets_of_the_user_must_cover_the_configuration() -> None:
    assert shapes(batch_buckets=(1, 64)).decode(2, 1, 5).rows == 64
    with pytest.raises(UnsupportedConfigError, match=r"batch_buckets ends at 32.*--max-num-seqs"):
        shapes(batch_buckets=(1, 32))
    with pytest.raises(UnsupportedConfigError, match=r"prefill_buckets ends at 128.*--max-num-batched-tokens"):
        shapes(prefill_buckets=(128,))
    with pytest.raises(UnsupportedConfigError, match="prefill_rows must contain 1"):
        shapes(prefill_rows=(2,))


def test_a_device_may_verify_fewer_drafts() -> None:
    assert shapes(drafts=8).decode_queries == (1, 9)
    with pytest.raises(UnsupportedConfigError, match=r"small verifies at most 8 drafts .* set num_speculative_tokens"):
        shapes(drafts=9)
