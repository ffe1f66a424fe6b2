"""The fused attention against attention written out, and what it does not take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vllm_gaudi_spec.emulator.card import DeviceRefusal

BLOCK = 128
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def dense(
    query_QND: torch.Tensor, key_SND: torch.Tensor, value_SND: torch.Tensor, seen_QS: torch.Tensor
) -> torch.Tensor:
    """One row, one head at a time, in float64."""
    queries, heads, size = query_QND.shape
    group = heads // key_SND.shape[1]
    out = torch.zeros(queries, heads, size, dtype=torch.float64)
    for head in range(heads):
        key, value = key_SND[:, head // group].double(), value_SND[:, head // group].double()
        for query in range(queries):
            seen = seen_QS[query].nonzero().flatten()
            if len(seen):
                weights = torch.softmax(key[seen] @ query_QND[query, head].double() / math.sqrt(size), 0)
                out[query, head] = weights @ value[seen]
    return out


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)


def scattered(rows_SND: list[torch.Tensor], apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of rows in blocks that lie anywhere, what is not theirs being NaN; and the table, padded with -1."""
    blocks = [-(-len(row) // BLOCK) for row in rows_SND]
    order = torch.randperm(sum(blocks) + 2).tolist()
    _, heads, size = rows_SND[0].shape
    pages = torch.full((len(order), BLOCK, heads, size), math.nan, dtype=rows_SND[0].dtype)
    table = torch.full((len(rows_SND), max(blocks) + 1), -1, dtype=torch.int32)
    for row, keys in enumerate(rows_SND):
        for number in range(blocks[row]):
            table[row, number] = block = order.pop()
            part = keys[number * BLOCK : (number + 1) * BLOCK]
            pages[block, : len(part)] = part
    return pages.transpose(1, 2).contiguous() if apart else pages.flatten(2), table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("queries", [1, 4])
def test_paged_with_a_mask_and_bounds(torch_npu: Any, dtype: torch.dtype, layout: str, queries: int) -> None:
    """Our own way: rows in a rectangle, keys in blocks, a mask that says what each query sees, and upper bounds."""
    heads, kv_heads, size, bounds = 4, 2, 32, [130, 5, 256]
    rows = [torch.randn(bound, kv_heads, size, dtype=dtype) for bound in bounds]
    values = [torch.randn(bound, kv_heads, size, dtype=dtype) for bound in bounds]
    torch.manual_seed(1)
    pages, table = scattered(rows, layout == "BNSD")
    torch.manual_seed(1)  # the same places
    value_pages, _ = scattered(values, layout == "BNSD")
    query = torch.randn(3, queries, heads, size, dtype=dtype)
    hidden = torch.rand(3, 1, queries, table.shape[1] * BLOCK) < 0.4
    hidden[..., 0] = False
    given = {"BSH": query.flatten(2), "BSND": query, "BNSD": query.transpose(1, 2).contiguous()}[layout]
    out, _ = torch_npu.npu_fused_infer_attention_score(
        given.to("npu"),
        pages.to("npu"),
        value_pages.to("npu"),
        atten_mask=hidden.to("npu"),
        block_table=table.to("npu"),
        block_size=BLOCK,
        actual_seq_lengths_kv=bounds,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=1 / math.sqrt(size),
        input_layout=layout,
        sparse_mode=0,
    )
    assert out.shape == given.shape
    out = out.cpu().transpose(1, 2) if layout == "BNSD" else out.cpu().view(query.shape)
    for row, bound in enumerate(bounds):
        close(out[row], dense(query[row], rows[row], values[row], ~hidden[row, 0, :, :bound]))


def visible(mode: int, queries: int, keys: int, pre: int = 0, following: int = 0) -> torch.Tensor:
    row, column = torch.arange(queries)[:, None], torch.arange(keys)
    last = row + keys - queries
    return {2: column <= row, 3: column <= last, 4: (column <= last + following) & (column >= last - pre)}[mode]


@pytest.mark.parametrize(("mode", "pre", "following"), [(2, 0, 0), (3, 0, 0), (4, 3, 0), (4, 2, 1)])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("paged", [False, True])
def test_compressed_masks(torch_npu: Any, mode: int, pre: int, following: int, layout: str, paged: bool) -> None:
    heads, kv_heads, size = 4, 2, 128
    queries, lengths = ([3, 3], [7, 140]) if layout == "BSND" else ([2, 4], [9, 140])
    rows = [torch.randn(length, kv_heads, size, dtype=torch.float16) for length in lengths]
    query = torch.randn(sum(queries), heads, size, dtype=torch.float16)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")
    kwargs: dict[str, Any] = dict(actual_seq_lengths_kv=lengths)
    if layout == "TND":
        kwargs["actual_seq_lengths"] = [queries[0], sum(queries)]
    if paged:
        pages, table = scattered(rows, False)
        kwargs |= dict(block_table=table.to("npu"), block_size=BLOCK)
    elif layout == "TND":
        pages = torch.cat(rows)
        kwargs["actual_seq_lengths_kv"] = [lengths[0], sum(lengths)]
    else:
        pages = torch.zeros(2, max(lengths), kv_heads, size, dtype=torch.float16)
        for row, keys in enumerate(rows):
            pages[row, : len(keys)] = keys
    given = query if layout == "TND" else query.view(2, 3, heads, size)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        given.to("npu"),
        pages.to("npu"),
        pages.to("npu"),
        atten_mask=mask,
        sparse_mode=mode,
        pre_tokens=pre,
        next_tokens=following,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=1 / math.sqrt(size),
        input_layout=layout,
        **kwargs,
    )
    start = 0
    for row, length in enumerate(lengths):
        part = query[start : start + queries[row]]
        seen = visible(mode, queries[row], length, pre, following)
        close(out.cpu().view_as(query)[start : start + queries[row]], dense(part, rows[row], rows[row], seen))
        start += queries[row]


def arguments(**changes: Any) -> dict[str, Any]:
    """Two rows of three queries, four heads over two, two blocks each."""
    tensors = dict(
        query=torch.randn(2, 3, 4, 32, dtype=torch.bfloat16),
        key=torch.randn(6, BLOCK, 64, dtype=torch.bfloat16),
        value=torch.randn(6, BLOCK, 64, dtype=torch.bfloat16),
        block_table=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        atten_mask=torch.zeros(2, 1, 3, 256, dtype=torch.bool),
        actual_seq_lengths_kv=[130, 256],
        block_size=BLOCK,
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BSND",
        scale=0.2,
    )
    return {k: v.to("npu") if isinstance(v, torch.Tensor) else v for k, v in (tensors | changes).items()}


def test_rows_that_see_nothing(torch_npu: Any) -> None:
    operation = torch_npu.npu_fused_infer_attention_score
    mask = torch.zeros(2, 1, 3, 256, dtype=torch.bool)
    mask[0, 0, 1] = True
    given = arguments(atten_mask=mask, actual_seq_lengths_kv=[130, 0])
    out = operation(**given)[0]
    values = torch.cat([given["value"][1], given["value"][2][:2]]).cpu().view(130, 2, 32).float().mean(0)
    torch.testing.assert_close(out[0, 1, ::2].cpu().float(), values, rtol=2e-2, atol=2e-2)
    assert not out[1].any()  # no keys at all
    corrected = operation(**given, inner_precise=2)[0]
    assert not corrected[0, 1].any()
    assert torch.equal(corrected[0, 0].cpu(), out[0, 0].cpu())


def test_queries_behind_a_rows_length_give_zero(torch_npu: Any) -> None:
    given = arguments()
    out = torch_npu.npu_fused_infer_attention_score(**given)[0]
    short = torch_npu.npu_fused_infer_attention_score(**given, actual_seq_lengths=[2])[0]
    assert torch.equal(short[:, :2].cpu(), out[:, :2].cpu())
    assert not short[:, 2].any()


def test_one_length_is_that_of_all_rows(torch_npu: Any) -> None:
    operation = torch_npu.npu_fused_infer_attention_score
    given = arguments()
    all_rows = given | {"actual_seq_lengths_kv": [200, 200]}
    assert torch.equal(operation(**(given | {"actual_seq_lengths_kv": [200]}))[0].cpu(), operation(**all_rows)[0].cpu())


def test_the_form_with_given_memory(torch_npu: Any) -> None:
    operation = torch_npu.npu_fused_infer_attention_score
    given = arguments()
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(**given)
    out, sums = torch.empty_like(given["query"]), torch.empty(1, device="npu")
    operation.out(**given, workspace=workspace, out=[out, sums])
    assert torch.equal(out.cpu(), operation(**given)[0].cpu())
    with pytest.raises(DeviceRefusal, match="workspace is too small"):
        operation.out(**given, workspace=workspace[:8], out=[out, sums])
    with pytest.raises(DeviceRefusal, match="attention_out"):
        operation.out(**given, workspace=workspace, out=[out.float(), sums])
    with pytest.raises(TypeError, match="out"):
        operation.out(**given, workspace=workspace)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(query=torch.randn(2, 3, 4, 32, dtype=torch.float64)), "query is torch.float64"),
        (dict(key=torch.randn(6, BLOCK, 64)), "one dtype"),
        (dict(value=torch.randn(6, BLOCK, 32, dtype=torch.bfloat16)), "one shape"),
        (dict(query=torch.randn(2, 4, 3, 32, dtype=torch.bfloat16).transpose(1, 2)), "query is not contiguous"),
        (dict(num_heads=8), "4 heads, num_heads is 8"),
        (dict(num_key_value_heads=3), "4 query heads over 3"),
        (dict(query=torch.randn(2, 3, 4, 36, dtype=torch.bfloat16)), "head size 36"),
        (dict(query=torch.randn(2, 3, 4, 520, dtype=torch.bfloat16)), "head size 520"),
        (dict(input_layout="TND"), "4 dimensions, TND 3"),
        (dict(input_layout="SBH"), "input_layout SBH"),
        (dict(key=torch.randn(6, 2, BLOCK, 32, dtype=torch.bfloat16),
              value=torch.randn(6, 2, BLOCK, 32, dtype=torch.bfloat16)), "paged keys are"),
        (dict(block_table=torch.tensor([[1, 2], [3, 4]])), "int32"),
        (dict(block_table=torch.tensor([[1, 2]], dtype=torch.int32)), "a row for each row"),
        (dict(block_table=torch.tensor([[1, 2], [3, 6]], dtype=torch.int32)), "block 6 of 6"),
        (dict(block_table=torch.tensor([[1, -1], [3, 4]], dtype=torch.int32)), "block -1 of 6"),
        (dict(block_size=64, actual_seq_lengths_kv=[1, 1]), "block_size 64 with several queries"),
        (dict(actual_seq_lengths_kv=None), "need actual_seq_lengths_kv"),
        (dict(actual_seq_lengths_kv=[]), "0 entries for 2 rows"),
        (dict(actual_seq_lengths_kv=[1, 257]), "257 where there is room for 256"),
        (dict(actual_seq_lengths_kv=[1, -1]), "from 0"),
        (dict(actual_seq_lengths=[4]), "4 where there is room for 3"),
        (dict(atten_mask=torch.zeros(2, 1, 3, 255, dtype=torch.bool)), "a mask of"),
        (dict(atten_mask=torch.zeros(3, 1, 3, 256, dtype=torch.bool)), "a mask of"),
        (dict(atten_mask=torch.zeros(2, 1, 3, 256)), "atten_mask is torch.float32"),
        (dict(sparse_mode=3), "takes a mask of 2048 x 2048"),
        (dict(sparse_mode=3, atten_mask=torch.zeros(2048, 2048, dtype=torch.bool)), "above the diagonal"),
        (dict(sparse_mode=1, atten_mask=None), "sparse_mode 1 takes a mask"),
        (dict(sparse_mode=5), "sparse_mode 5"),
        (dict(softmax_lse_flag=True), "not emulated"),
        (dict(block_table=torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], dtype=torch.int32),
              atten_mask=None, actual_seq_lengths_kv=[385, 385]), "rows of 8 blocks together, and there are 6"),
    ],
)  # fmt: skip
def test_what_it_does_not_take(torch_npu: Any, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DeviceRefusal, match=why):
        torch_npu.npu_fused_infer_attention_score(**arguments(**changes))


def test_one_query_a_row_has_rules_of_its_own(torch_npu: Any) -> None:
    operation = torch_npu.npu_fused_infer_attention_score
    single = dict(query=torch.randn(2, 1, 4, 32, dtype=torch.bfloat16), atten_mask=None)
    small = dict(key=torch.randn(6, 16, 64, dtype=torch.bfloat16), value=torch.randn(6, 16, 64, dtype=torch.bfloat16))
    operation(**arguments(**single, **small, block_size=16, actual_seq_lengths_kv=[17, 32]))
    with pytest.raises(DeviceRefusal, match="block_size 8"):
        operation(**arguments(**single, block_size=8, actual_seq_lengths_kv=[1, 1]))
    with pytest.raises(DeviceRefusal, match="inner_precise is 0 or 1"):
        operation(**arguments(**single, inner_precise=2))
    mask = torch.rand(2, 256) < 0.5
    flat = operation(**arguments(**single | {"atten_mask": mask}))[0]
    assert flat.shape == (2, 1, 4, 32)


def test_npu_v06_the_backend_finds_that_blocks_are_added_up(torch_npu: Any) -> None:
    from vllm_gaudi_spec.devices.ascend.attention import adds_up_blocks

    assert all(adds_up_blocks(torch_npu, torch.device("npu"), num_queries) for num_queries in (1, 2))


def test_lengths_are_lists_on_the_host(torch_npu: Any) -> None:
    operation = torch_npu.npu_fused_infer_attention_score
    for lengths in (torch.tensor([130, 256]), torch.tensor([130, 256]).to("npu")):
        with pytest.raises(TypeError, match="list of numbers on the host"):
            operation(**arguments(actual_seq_lengths_kv=lengths))


def test_what_is_left_out_is_refused_by_name(torch_npu: Any) -> None:
    with pytest.raises(NotImplementedError, match="key_rope, query_rope"):
        torch_npu.npu_fused_infer_attention_score(**arguments(), query_rope=torch.ones(1), key_rope=torch.ones(1))
    with pytest.raises((TypeError, RuntimeError), match="softmax_scale"):
        torch_npu.npu_fused_infer_attention_score(**arguments(), softmax_scale=1.0)
    torch_npu.npu_fused_infer_attention_score(**arguments(), query_rope=None)
