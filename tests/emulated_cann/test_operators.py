"""Operators of the emulated CANN, called by torch_npu, beside torch on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
    "repeat": lambda to: to(A).repeat(2, 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_beside_torch(name: str, npu: Any) -> None:
    operator = OPERATORS[name]
    expected = operator(lambda tensor: tensor)
    found = operator(lambda tensor: tensor.to("npu"))
    assert found.device.type == "npu"
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected)


def test_of_one_shape(npu: Any) -> None:
    """What a program reads is copied by one operator."""
    targets, sources = [torch.zeros(4, device="npu"), torch.zeros(2, device="npu")], [A[0].npu(), B[0, :2].npu()]
    torch._foreach_copy_(targets, sources)
    assert torch.equal(targets[0].cpu(), A[0])
    assert torch.equal(targets[1].cpu(), B[0, :2])


def test_rms_norms(npu: Any) -> None:
    import torch_npu

    weight = torch.tensor([1.0, 2.0, 0.5, 1.5])
    expected = torch.nn.functional.rms_norm(A + B, (4,), weight, 1e-6)
    torch.testing.assert_close(torch_npu.npu_rms_norm((A + B).npu(), weight.npu(), 1e-6)[0].cpu(), expected)
    normed, _, added = torch_npu.npu_add_rms_norm(A.npu(), B.npu(), weight.npu(), 1e-6)
    torch.testing.assert_close(normed.cpu(), expected)
    torch.testing.assert_close(added.cpu(), A + B)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary(mode: str, npu: Any) -> None:
    import torch_npu

    x, angle = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 1, 8)
    if mode == "half":
        turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    found = torch_npu.npu_rotary_mul(x.npu(), angle.cos().npu(), angle.sin().npu(), mode)
    torch.testing.assert_close(found.cpu(), x * angle.cos() + turned * angle.sin())


def test_swiglu(npu: Any) -> None:
    import torch_npu

    torch.testing.assert_close(torch_npu.npu_swiglu(A.npu(), -1).cpu(), torch.nn.functional.silu(A[:, :2]) * A[:, 2:])


def test_kv_writes_and_paged_attention(npu: Any) -> None:
    """Two rows of one query over keys that lie in blocks, behind a mask, with the bound of one row cut."""
    import torch_npu

    torch.manual_seed(0)
    heads, size, block = 2, 16, 128
    keys, values = (torch.zeros(4, block, heads, size, device="npu") for _ in range(2))
    new_keys, new_values = torch.randn(300, heads, size), torch.randn(300, heads, size)
    slots = torch.arange(block, block + 300)
    torch_npu.npu_scatter_pa_kv_cache(new_keys.npu(), new_values.npu(), keys, values, slots.npu(), cache_mode="Norm")
    query = torch.randn(2, 1, heads, size)
    lengths, table = [300, 40], torch.tensor([[1, 2, 3], [1, 0, 0]], dtype=torch.int32)
    hidden = torch.zeros(2, 1, 1, 3 * block, dtype=torch.bool)
    hidden[0, ..., 250:] = True
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        keys.flatten(2),
        values.flatten(2),
        atten_mask=hidden.npu(),
        block_table=table.npu(),
        actual_seq_lengths_kv=lengths,
        input_layout="BSND",
        block_size=block,
        num_heads=heads,
        num_key_value_heads=heads,
        scale=0.25,
        sparse_mode=0,
    )
    for row, seen in ((0, 250), (1, 40)):
        scores = torch.einsum("hd,khd->hk", query[row, 0], new_keys[:seen]) * 0.25
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), new_values[:seen])
        torch.testing.assert_close(out[row, 0].cpu(), expected)


def test_arguments_that_the_documentation_refuses(npu: Any) -> None:
    import torch_npu

    keys = torch.zeros(4, 128, 2, 16, device="npu")
    new = torch.zeros(1, 2, 16, device="npu")
    slots = torch.tensor([5]).npu()
    with pytest.raises(RuntimeError, match="is for the layout NZ"):
        torch_npu.npu_scatter_pa_kv_cache(new, new, keys, keys, slots)
