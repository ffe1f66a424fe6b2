"""Operators of the emulated CANN, called by torch_npu, beside torch on the host."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cann_processes import run_python

from card_emulator.ascend.cann.build import LIBRARY

A = torch.tensor([[1.5, -2.0, 3.0, 0.25], [0.5, 4.0, -1.0, 2.0]])
B = torch.tensor([[2.0, 2.0, -1.0, 8.0], [1.0, 3.0, 5.0, 0.5]])
I = torch.tensor([[3, 1, 0, 2], [1, 0, 2, 3]])  # noqa: E741
N = torch.tensor([[37, -5, 1 << 30, 7], [2, 9, -1, 12]], dtype=torch.int32)
M = A > 1

OPERATORS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
    "add": lambda to: to(A) + 2 * to(B) - 1,
    "add with alpha": lambda to: torch.add(to(A), to(B), alpha=3),
    "sub": lambda to: torch.sub(to(A), to(B), alpha=2),
    "div": lambda to: to(A) / to(B),
    "floor": lambda to: to(N) // 3,
    "remainder": lambda to: to(N) % 5,
    "compare": lambda to: (to(A) < to(B)) | (to(A) == 3) & (to(A) >= to(B)),
    "bits": lambda to: (to(N) ^ 5) & ~to(N) | (to(N) & 12),
    "shift": lambda to: to(N) >> 3,
    "clamp": lambda to: to(A).clamp(max=2),
    "clamp both": lambda to: to(A).clamp(-1, 1),
    "where": lambda to: torch.where(to(M), to(A), 0),
    "reductions": lambda to: torch.stack([to(A).amax(-1), to(A).amin(-1), to(A).sum(-1), to(A).logsumexp(-1)]),
    "std": lambda to: to(A).std(-1) + to(A).std(-1, unbiased=False) + to(A).std(),
    "argmax": lambda to: to(A).argmax(-1),
    "any all": lambda to: torch.stack([to(M).any(-1), to(M).all(-1)]),
    "cumsum": lambda to: to(A).cumsum(-1),
    "cumprod": lambda to: to(N).cumprod(-1),
    "softmax": lambda to: to(A).softmax(-1) + to(A).log_softmax(-1),
    "topk": lambda to: to(A).topk(2).values,
    "sort": lambda to: to(A).sort(descending=True).indices,
    "gather": lambda to: to(A).gather(1, to(I)),
    "index_select": lambda to: to(A).index_select(1, to(I)[0]),
    "index_copy": lambda to: to(A).clone().index_copy_(1, to(I)[0], to(B)),
    "index_fill": lambda to: to(A).clone().index_fill_(1, to(I)[0, :2], 9),
    "scatter_add": lambda to: to(A).scatter_add(1, to(I), to(B)),
    "masked_fill": lambda to: to(A).masked_fill(to(M), 0),
    "embedding": lambda to: torch.nn.functional.embedding(to(I), to(torch.arange(8.0).view(4, 2))),
    "cat": lambda to: torch.cat([to(A), to(B)], 1),
    "matmul": lambda to: to(A) @ to(B).T,
    "linear": lambda to: torch.nn.functional.linear(to(A), to(B), to(torch.tensor([1.0, 2.0]))),
    "casts": lambda to: to(A).to(torch.float16).to(torch.int64).to(torch.bfloat16),
    "views": lambda to: to(A).T[1:].contiguous() + to(B).t()[1:],
    "functions": lambda to: to(B).abs().log() + to(A).exp().log1p() + to(A).tanh() + to(A).sigmoid() + to(A).neg(),
    "norm": lambda to: torch.nn.functional.normalize(to(A), dim=-1) + torch.linalg.vector_norm(to(A), dim=-1)[:, None],
    "softplus": lambda to: torch.nn.functional.softplus(to(A)),
    "repeat": lambda to: to(A).repeat(2, 1),
    "repeat_interleave": lambda to: to(A).flatten().repeat_interleave(to(I).flatten()),
    "repeat_interleave of rows": lambda to: to(A).repeat_interleave(to(torch.tensor([2, 0])), 0),
    "nan_to_num": lambda to: (to(A) / to(M)).nan_to_num(5, posinf=6, neginf=7),
    "nonzero": lambda to: to(M).nonzero(),
    "where alone": lambda to: torch.stack(torch.where(to(M))),
    "read by a mask": lambda to: to(A)[to(M)],
    "written by a mask": lambda to: to(A).clone().index_put_((to(M),), to(A)[to(M)] + 1),
    "a mask of nothing": lambda to: to(A).clone().index_put_((to(A) > 9,), to(A)[to(A) > 9]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_beside_torch(name: str, npu: Any) -> None:
    operator = OPERATORS[name]
    expected = operator(lambda tensor: tensor)
    found = operator(lambda tensor: tensor.to("npu"))
    assert found.device.type == "npu"
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected)


GROUPS = torch.randn(5, 8), torch.randn(3, 4, 8)


def in_groups(counts: torch.Tensor) -> torch.Tensor:
    import torch_npu

    rows, matrices = GROUPS
    (found,) = torch_npu.npu_grouped_matmul(
        [rows.npu()],
        [matrices.npu().transpose(1, 2)],
        group_list=counts.npu(),
        split_item=2,
        group_type=0,
        group_list_type=1,
    )
    return found


def test_products_in_groups(npu: Any) -> None:
    rows, matrices = GROUPS
    found = in_groups(torch.tensor([2, 0, 3]))
    torch.testing.assert_close(found.cpu(), torch.cat([rows[:2] @ matrices[0].T, rows[2:] @ matrices[2].T]))


def attention(**changes: Any) -> Any:
    """Two rows of two queries over up to 256 keys, as the backend asks for it."""
    import torch_npu

    tensors: dict[str, Any] = dict(
        query=torch.zeros(2, 2, 4, 32),
        key=torch.zeros(6, 128, 64),
        value=torch.zeros(6, 128, 64),
        atten_mask=torch.zeros(2, 1, 2, 256, dtype=torch.bool),
        block_table=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
    )
    rest: dict[str, Any] = dict(
        actual_seq_lengths_kv=[130, 256],
        input_layout="BSND",
        block_size=128,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.2,
        sparse_mode=0,
    )
    made = {name: (changes.pop(name)() if name in changes else value.npu()) for name, value in tensors.items()}
    return torch_npu.npu_fused_infer_attention_score(**made, **(rest | changes))


def kv_write(num_tokens: int = 2, cache_mode: str = "Norm") -> None:
    import torch_npu

    cache = torch.zeros(4, 128, 2, 16, device="npu")
    tokens = torch.ones(num_tokens, 2, 16, device="npu")
    slots = (torch.arange(num_tokens) % 512).npu()
    torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, cache, cache.clone(), slots, cache_mode=cache_mode)


PAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "a layout of its own": (lambda: kv_write(cache_mode="PA_NZ"), "is for the layout NZ"),
    "more tokens than slots": (lambda: kv_write(num_tokens=513), "more tokens than slots"),
    "keys that are not contiguous": (
        lambda: attention(key=lambda: torch.zeros(128, 6, 64).npu().transpose(0, 1)),
        "not contiguous",
    ),
    "more blocks together than there are": (
        lambda: attention(
            block_table=lambda: torch.tensor([[1, 2, 3, 4]] * 2, dtype=torch.int32).npu(),
            atten_mask=lambda: torch.zeros(2, 1, 2, 512, dtype=torch.bool).npu(),
            actual_seq_lengths_kv=[385, 385],
        ),
        "rows of 8 blocks together",
    ),
    "a mask that is narrower than the table": (
        lambda: attention(
            atten_mask=lambda: torch.zeros(2, 1, 2, 255, dtype=torch.bool).npu(), actual_seq_lengths_kv=[130, 200]
        ),
        "a mask of",
    ),
    "a mask of numbers": (lambda: attention(atten_mask=lambda: torch.zeros(2, 1, 2, 256).npu()), "atten_mask is"),
    "a correction that one query has not": (
        lambda: attention(
            query=lambda: torch.zeros(2, 1, 4, 32).npu(),
            atten_mask=lambda: torch.zeros(2, 1, 1, 256, dtype=torch.bool).npu(),
            inner_precise=2,
        ),
        "inner_precise 2",
    ),
    "queries without keys": (lambda: attention(actual_seq_lengths_kv=[130, 0]), "a row of queries without keys"),
    "more heads to a key than 64": (
        lambda: attention(query=lambda: torch.zeros(2, 2, 130, 32).npu(), num_heads=130),
        "130 heads over 2",
    ),
    "one query over more keys than 262,144": (
        lambda: attention(
            query=lambda: torch.zeros(2, 1, 4, 32).npu(),
            atten_mask=lambda: torch.zeros(2, 1, 1, 2049 * 128, dtype=torch.bool).npu(),
            block_table=lambda: torch.ones(2, 2049, dtype=torch.int32).npu(),
        ),
        "262144 keys at most",
    ),
    "a compressed mask of numbers": (
        lambda: attention(sparse_mode=3, atten_mask=lambda: torch.ones(2048, 2048).triu(1).npu()),
        "a compressed mask is",
    ),
    "groups by int32": (lambda: in_groups(torch.tensor([2, 0, 3], dtype=torch.int32)), "group_list"),
}
"""Calls that the operators' pages refuse, and in which words."""


@pytest.mark.parametrize("case", PAGES)
def test_npu_v04_a17_calls_that_the_pages_refuse(case: str, npu: Any) -> None:
    """Each passes once its rule is switched off: no other one refuses it."""
    run, words = PAGES[case]
    with pytest.raises(RuntimeError, match=words):
        run()
    library = ctypes.CDLL(LIBRARY)
    library.emulated_cann_allow(words.encode())
    try:
        run()
        npu.synchronize()
    finally:
        library.emulated_cann_allow(b"")


def slots(*numbers: int) -> None:
    import torch_npu

    tokens, cache = torch.ones(len(numbers), 2, 16, device="npu"), torch.zeros(4, 128, 2, 16, device="npu")
    where = torch.tensor(numbers).npu()
    torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, cache, cache.clone(), where, cache_mode="Norm")
    torch.npu.synchronize()


def test_npu_a24_two_tokens_for_one_slot() -> None:
    """Padding goes to the first block, and may be more than that has slots. What fails on the card ends the process."""
    out = run_python(
        "from test_operators import slots\n"
        "slots(*range(128), 127)\n"
        "print('padding')\n"
        "try:\n"
        "    slots(128, 300, 128)\n"
        "except RuntimeError as error:\n"
        "    print('raised', 'two tokens for one slot' in str(error))\n"
        "import os; os._exit(0)\n"
    )
    assert out.splitlines()[-2:] == ["padding", "raised True"], out


def test_keys_as_they_came(npu: Any) -> None:
    """Without blocks, rows one behind the other: a prompt that has read nothing before."""
    import torch_npu

    query, key, value = (torch.randn(7, heads, 32) for heads in (4, 2, 2))
    ends = [3, 4, 7]
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu(),
        sparse_mode=3,
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=ends,
        input_layout="TND",
        num_heads=4,
        num_key_value_heads=2,
        scale=0.2,
    )
    for start, end in zip([0, *ends], ends, strict=False):
        keys, values = (it[start:end].repeat_interleave(2, 1) for it in (key, value))
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end], keys) * 0.2
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        torch.testing.assert_close(out[start:end].cpu(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing(npu: Any) -> None:
    keys = torch.randn(6, 128, 2, 32)
    hidden = torch.zeros(2, 1, 2, 256, dtype=torch.bool)
    hidden[0, 0, 1] = True
    given: dict[str, Any] = dict(
        query=lambda: torch.ones(2, 2, 4, 32).npu(),
        key=lambda: keys.flatten(2).npu(),
        value=lambda: keys.flatten(2).npu(),
        atten_mask=lambda: hidden.npu(),
    )
    out = attention(**given)[0].cpu()
    mean = torch.cat([keys[1], keys[2][:2]]).mean(0)
    torch.testing.assert_close(out[0, 1, ::2], mean)
    corrected = attention(**given, inner_precise=2)[0].cpu()
    assert not corrected[0, 1].any()
    assert torch.equal(corrected[0, 0], out[0, 0])


def test_npu_v09_names_that_the_backend_uses_are_in_the_package(npu: Any) -> None:
    import torch_npu

    for owner, names in (
        (torch_npu, ["npu_fused_infer_attention_score", "_npu_fused_infer_attention_score_get_max_workspace"]),
        (torch_npu, ["npu_rms_norm", "npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_scatter_pa_kv_cache"]),
        (torch_npu._C, ["_weak_ref_tensor"]),
        (npu, ["NPUGraph", "graph_pool_handle", "graph_task_group_begin", "graph_task_group_end"]),
        (npu, ["graph_task_update_begin", "graph_task_update_end", "mem_get_info", "max_memory_allocated"]),
    ):
        assert [name for name in names if not hasattr(owner, name)] == []
    assert hasattr(torch_npu.npu_fused_infer_attention_score, "out")


def test_what_torch_npu_runs_on_the_host_is_counted(card: Any, npu: Any) -> None:
    """By the function of torch through which all of these go, with the line that asked for it."""
    before = card.counters.total.fallbacks
    found = torch.special.i0(A.npu())
    torch.testing.assert_close(found.cpu(), torch.special.i0(A))
    assert card.counters.total.fallbacks == before + 1
    (event,) = [event for event in card.counters.events if "i0" in event.what]
    assert (event.kind, event.what) == ("CPU fallback", "aten::i0.out")
    assert "test_operators.py" in event.where
