"""The list of shapes is closed and small: it holds every shape that a scheduler may request."""

import random
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fakes import HostBackend
from vllm_gaudi_spec.config import Options, UnsupportedConfigError
from vllm_gaudi_spec.devices.base import DeviceTraits
from vllm_gaudi_spec.devices.hpu import backend as hpu
from vllm_gaudi_spec.runner.shapes import Shapes


def shapes(
    max_num_seqs: int = 64,
    max_tokens: int = 2048,
    max_len: int = 1024,
    exact: bool = True,
    drafts: int = 0,
    flat: bool = False,
    num_ranks: int = 1,
    num_stages: int = 1,
    num_blocks: int | None = None,
    captures: bool = False,
    causal_first_chunks: bool = False,
    slice_tokens: int = 0,
    backend: Any = None,
    in_place: bool = False,
    **options: object,
) -> Shapes:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens),
        model_config=SimpleNamespace(
            max_model_len=max_len,
            is_moe=True,
            is_multimodal_model=False,
            enable_prompt_embeds=False,
            runner_type="generate",
            has_inner_state=False,
        ),
        parallel_config=SimpleNamespace(data_parallel_size=num_ranks, pipeline_parallel_size=num_stages),
    )
    traits = DeviceTraits(
        name="small",
        mode="eager",
        torch_device=torch.device("cpu"),
        exact_context_width=exact,
        captures=captures,
        causal_first_chunks=causal_first_chunks,
        smallest_prefill=16,
        prefill_step=16,
        slice_tokens=slice_tokens,
        max_drafts=8,
        flat_decode=flat,
        block_size=16,
    )
    widths = (drafts,) if drafts else ()
    device, chosen = backend or SimpleNamespace(traits=traits), Options(**options)
    return Shapes.from_config(
        config, chosen, device, widths, num_blocks=num_blocks, slices_chunks=True, in_place=in_place
    )


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
                assert shape.context >= start + length, "padding may extend past the block table"
    for num in range(1, 18):
        for queries in chosen.decode_queries:
            assert chosen.decode(queries, [200] * num) in listed


@pytest.mark.parametrize("max_len", [16, 100, 1024])
def test_only_chunks_from_the_start_get_their_shapes(max_len: int) -> None:
    chosen = shapes(max_len=max_len, exact=False, captures=True, causal_first_chunks=True)
    masked = shapes(max_len=max_len, exact=False, captures=True)
    listed = set(chosen.prefills())
    if max_len == 1024:
        assert len(listed) == len(masked.prefills()) + 1, "only the longest chunks had one shape for both"
    for length in range(1, max_len + 1):
        for start in {0, 1, 5, 16, max_len - length}:
            if start + length > max_len:
                continue
            shape = chosen.prefill(1, length, start + length, start=start)
            assert shape in listed
            assert shape.context >= start + length
            assert chosen.begins_at_start(shape) == (start == 0)
            assert not masked.begins_at_start(masked.prefill(1, length, start + length, start=start))
    assert not any(map(chosen.begins_at_start, set(chosen.all()) - listed))


def test_gaudi_prompt_lengths_are_half_powers_of_two_from_512() -> None:
    chosen = shapes(max_tokens=8192, max_len=8192, backend=SimpleNamespace(traits=hpu.TRAITS))
    assert chosen.prefill_queries == (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def test_slices_of_any_chunks_fit_a_listed_shape() -> None:
    rng = random.Random(0)
    chosen = shapes(max_tokens=512, max_len=256, captures=True, slice_tokens=16)
    listed = set(chosen.prefills())
    for _ in range(200):
        counts = [rng.randint(1, 256) for _ in range(rng.randint(1, 12))]
        parts = chosen.split_chunks(counts)
        assert sum(parts) == len(counts)
        for size in parts:
            part, counts = counts[:size], counts[size:]
            num_rows = sum(-(-count // 16) for count in part)
            shape = chosen.prefill_slices(num_rows, 256)
            assert shape in listed
            assert shape.tokens >= sum(part)


def test_slices_share_a_forward_where_that_computes_less() -> None:
    chosen = shapes(max_tokens=512, max_len=256, captures=True, slice_tokens=16)
    assert chosen.split_chunks([250]) == [1]
    assert chosen.split_chunks([5, 100, 40, 230]) == [4]
    assert chosen.split_chunks([256, 240, 16, 16]) == [3, 1], "512 tokens fit"
    long = shapes(max_tokens=16384, max_len=4096, captures=True, slice_tokens=16)
    assert long.split_chunks([4096, 100, 4096, 4096, 50, 60]) == [1, 1, 2, 2], "8,192 tokens fit"
    with_rows = shapes(max_tokens=512, max_len=256, captures=True, slice_tokens=16, prefill_rows=(1, 2))
    assert (with_rows.slice_tokens, with_rows.prefill_rows) == (0, (1, 2)), "the user's choice"
    with_lengths = shapes(max_tokens=512, max_len=256, captures=True, slice_tokens=16, prefill_buckets=(64, 256))
    assert (with_lengths.slice_tokens, with_lengths.prefill_queries) == (0, (64, 256)), "the user's choice"
    assert shapes(num_ranks=2, captures=True, slice_tokens=16).slice_tokens == 0
    assert shapes(num_stages=2, captures=True, slice_tokens=16).slice_tokens == 0
    longer = chosen.change_length(512, HostBackend())
    assert longer.slice_tokens == 0, "such a drafter reads its own tokens"


def test_user_buckets() -> None:
    assert shapes(batch_buckets=(1, 64)).decode(1, [5, 5]).rows == 64
    with pytest.raises(UnsupportedConfigError, match="prefill_rows must contain 1"):
        shapes(prefill_rows=(2,))


def test_sizes_beyond_a_short_list_share_a_late_size(caplog: pytest.LogCaptureFixture) -> None:
    chosen = shapes(64, 300, 1024, exact=False, drafts=3, flat=True, batch_buckets=(1, 32), prefill_buckets=(128,))
    assert (chosen.most_rows, chosen.longest_chunk) == (64, 304)
    listed = set(chosen.all())
    assert max(shape.rows for shape in listed) == 32
    assert max(shape.queries for shape in listed) == 128
    for num_rows in (32, 33, 64):
        decode = chosen.decode(4, [5] * num_rows)
        assert decode.rows == chosen.fit_rows(num_rows) == (32 if num_rows == 32 else 64)
        assert (decode in listed) == (num_rows == 32)
        # As in lockstep with a rank that has this many, whatever this one has.
        assert chosen.decode(4, [5], num_rows=num_rows).rows == decode.rows
    for length, start in product((128, 129, 300), (0, 700, 724)):
        chunk = chosen.prefill(1, length, start + length)
        assert chunk.queries == (128 if length == 128 else 304)
        assert (chunk in listed) == (length == 128)
        assert chunk.context >= start + length
        assert chosen.prefill_rows_at(length) == 1
    with pytest.raises(AssertionError):
        chosen.fit_rows(65)  # more than --max-num-seqs


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("max_len", [16, 100, 1024])
def test_r07_every_flat_decode_is_listed(max_len: int, drafts: int) -> None:
    """Rows may have any lengths: all of one block, all of the maximum length, or anything between."""
    chosen = shapes(17, 300, max_len, exact=False, drafts=drafts, flat=True)
    listed, rng = set(chosen.all()), random.Random(0)
    longest = max_len + drafts  # a verify step's padding may stand behind the last position
    for num in range(1, 18):
        cases = [[1] * num, [16] * num, [17] * num, [max_len] * num, [longest] * num, [longest] + [1] * (num - 1)]
        cases += [[rng.randint(1, longest) for _ in range(num)] for _ in range(50)]
        for ends in cases:
            for queries in chosen.decode_queries:
                shape = chosen.decode(queries, ends)
                assert shape in listed, ends
                assert shape.rows >= num
                assert shape.context >= sum(-(-min(end, max_len) // 16) for end in ends), "every block has a place"


@pytest.mark.parametrize("num_blocks", [10, 18, 300, 1500])
def test_every_decode_in_place_is_listed_and_cheaper_than_gathering(
    num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = shapes(17, 300, 1024, exact=False, drafts=5, flat=True, num_blocks=num_blocks, in_place=True)
    listed, rng = set(chosen.all()), random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(2000):
        ends = [rng.randint(1, 1024) for _ in range(rng.randint(1, 17))]
        needed = sum(-(-end // 16) for end in ends)
        if needed >= num_blocks + 3:  # the scheduler would have preempted some of them
            continue
        # The last blocks of some rows may not be assigned yet, because only padding needs them.
        used = min(needed, num_blocks - 1)
        last_block = rng.randint(used, min(num_blocks - 1, 8 * used))
        shape = chosen.decode(rng.choice(chosen.decode_queries), ends, last_block=last_block)
        assert shape in listed
        found[shape.in_place] += 1
        if shape.in_place:
            assert last_block < shape.context <= num_blocks
            gathered = min(max(needed, shape.rows), chosen.entries[-1])
            assert shape.context <= 2 * min(size for size in chosen.entries if size >= gathered)
        else:
            assert shape.context >= needed
    assert found[True]
    assert found[False] or num_blocks < 300
    assert "exceeds the largest value" not in caplog.text


def test_r05_block_buckets_are_bounded_by_memory() -> None:
    """Otherwise 256 sequences of 128k tokens would list 262,144 blocks, 86 GB of KV per layer, where 1,000 exist."""
    chosen = shapes(max_num_seqs=256, max_len=16 * 1024, exact=False, flat=True, num_blocks=1000)
    assert chosen.entries[-1] == 3 * 1000
    everything = shapes(max_num_seqs=4, max_len=160, exact=False, flat=True, num_blocks=1000)
    assert everything.entries[-1] == 4 * 10, "and at what the configuration can reach"


def test_r06_decode_beyond_the_listed_blocks_is_made_late(caplog: pytest.LogCaptureFixture) -> None:
    chosen = shapes(max_num_seqs=8, max_len=1024, exact=False, flat=True, block_buckets=(10, 100))
    assert chosen.entries == (10, 100), "a list may be shorter than what the configuration can reach"
    assert chosen.decode(1, [16] * 8).context == 10
    with caplog.at_level("WARNING", logger="vllm_gaudi_spec"):
        assert chosen.decode(1, [1024] * 8).context == 800
        assert chosen.decode(1, [1024] * 2, 8).context == 200
    assert "exceeds the largest value in block_buckets, 100" in caplog.text
    with pytest.raises(UnsupportedConfigError, match="leave out the larger ones"):
        shapes(max_num_seqs=8, max_len=1024, exact=False, flat=True, block_buckets=(10, 1_000_000))


@pytest.mark.parametrize("flat", [False, True])
def test_decodes_widened_for_other_ranks_are_listed(flat: bool) -> None:
    """This includes decodes with fewer blocks than that many rows would have."""
    chosen = shapes(max_num_seqs=9, max_len=200, flat=flat, drafts=2)
    listed = set(chosen.all())
    for num_rows in chosen.decode_rows:
        for ends in ([], [1], [17, 200], [200] * 9):
            shape = chosen.decode(3, ends, num_rows)
            assert shape in listed
            assert shape.rows >= max(num_rows, len(ends))
            assert not flat or shape.context >= max(num_rows, sum(-(-end // 16) for end in ends))
