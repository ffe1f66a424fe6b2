"""Prompt chunks by FlashAttention: rows become sequences, and results equal attention in float64."""

import dataclasses

import pytest
import torch

from tests.support.attention_layers import call
from tests.unit.attention.test_paged_attention import TOLERANCE, make_scene
from vllm_gaudi_spec.devices.common.kv_pair import KVPair
from vllm_gaudi_spec.upstream.flash_attention import find_flash_attention

QUERIES = 32


def test_rows_that_continue_one_another_are_one_sequence() -> None:
    from vllm_gaudi_spec.devices.cuda.prompts import join_rows

    first, second, pad = [1, 2, 3], [1, 4, 0], [0, 0, 0]
    found = join_rows(call([64, 96, 128, 128, 0, 0], [first, first, first, second, pad, pad], QUERIES))
    assert found.ends_S.tolist() == [0, 96, 128, 160, 192, 192, 192]
    assert found.lengths_B.tolist() == [160, 160, 32, 32, 0, 0]
    assert found.block_table_BW[:4].tolist() == [first, second, pad, pad]
    assert found.ends_S.dtype == found.lengths_B.dtype == torch.int32


def test_requests_with_a_shared_prefix_are_two_sequences() -> None:
    from vllm_gaudi_spec.devices.cuda.prompts import join_rows

    found = join_rows(call([64, 96], [[1, 2, 3], [1, 2, 4]], QUERIES))
    assert found.ends_S.tolist() == [0, 32, 64]
    assert found.lengths_B.tolist() == [96, 128]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "window", "soft_cap"),
    [(8, 2, 128, None, 0.0), (4, 4, 64, 100, 0.0), (8, 1, 256, None, 30.0)],
)
def test_chunks_in_rows_and_in_slices_equal_float64(
    dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, window: int | None, soft_cap: float
) -> None:
    from vllm_gaudi_spec.devices.cuda import prompts

    if find_flash_attention() is None:
        pytest.skip("vLLM has no FlashAttention 3 for this GPU")
    starts, count = [0, 5, 130], 320
    scene = make_scene(
        starts,
        count,
        real=[count, 33, count],
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        window=window,
        soft_cap=soft_cap,
        dtype=dtype,
    )
    slices = count // QUERIES

    def attend(query, keys, values, call, spec, sliced):
        kv = KVPair(keys.flatten(0, 1).cuda(), values.flatten(0, 1).cuda(), spec.block_size)
        there = dataclasses.replace(
            call, starts_B=call.starts_B.cuda(), block_table_BW=call.block_table_BW.cuda(), flat=None, _plans={}
        )
        if sliced:
            offsets = torch.arange(0, count, QUERIES, dtype=torch.int32, device="cuda")
            there = dataclasses.replace(
                there,
                num_rows=call.num_rows * slices,
                num_queries=QUERIES,
                starts_B=(there.starts_B[:, None] + offsets).flatten(),
                block_table_BW=there.block_table_BW.repeat_interleave(slices, dim=0),
            )
        assert prompts.supports(spec)
        return prompts.attend(query.cuda(), kv, there, spec).cpu()

    atol, rtol = TOLERANCE[torch.bfloat16]
    for sliced in (False, True):
        found = scene.attend(lambda *args, sliced=sliced: attend(*args, sliced))
        for row, expected in enumerate(scene.dense()):
            torch.testing.assert_close(found[row, : scene.real[row]].double(), expected, atol=atol, rtol=rtol)
