"""Fused operations against what they are made of, and what they do not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_gaudi_spec.emulator.card import DeviceRefusal

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if expected.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(torch_npu: Any, dtype: torch.dtype) -> None:
    x, gamma = torch.randn(3, 4, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    normed, inverse = torch_npu.npu_rms_norm(x.to("npu"), gamma.to("npu"), 1e-5)
    close(normed, F.rms_norm(x.float(), (16,), gamma.float(), 1e-5).to(dtype))
    assert inverse.shape == (3, 4, 1)
    assert inverse.dtype == torch.float32
    close(inverse, 1 / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt())
    with_wide, _ = torch_npu.npu_rms_norm(x.to("npu"), gamma.float().to("npu"), 1e-5)
    close(with_wide, normed.cpu())


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm(torch_npu: Any, dtype: torch.dtype) -> None:
    x, residual, gamma = (torch.randn(*shape, dtype=dtype) for shape in ((5, 16), (5, 16), (16,)))
    normed, inverse, total = torch_npu.npu_add_rms_norm(x.to("npu"), residual.to("npu"), gamma.to("npu"), 1e-6)
    assert torch.equal(total.cpu(), x + residual)
    close(normed, F.rms_norm((x + residual).float(), (16,), gamma.float(), 1e-6).to(dtype))
    assert inverse.shape == (5, 1)


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(
    ("shape", "tables"), [((6, 2, 8), (6, 1, 8)), ((1, 6, 2, 8), (1, 6, 1, 8)), ((3, 2, 2, 8), (1, 2, 1, 8))]
)
def test_rotary(torch_npu: Any, mode: str, shape: tuple[int, ...], tables: tuple[int, ...]) -> None:
    """As a product of complex numbers."""
    x = torch.randn(shape)
    angle = torch.randn(*tables[:-1], tables[-1] // 2)
    pairs = (x.unflatten(-1, (2, -1)).transpose(-1, -2) if mode == "half" else x.unflatten(-1, (-1, 2))).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angle), angle))
    expected = (turned.transpose(-1, -2) if mode == "half" else turned).flatten(-2)
    full = torch.cat((angle, angle), -1) if mode == "half" else angle.repeat_interleave(2, -1)
    out = torch_npu.npu_rotary_mul(x.to("npu"), full.cos().to("npu"), full.sin().to("npu"), rotary_mode=mode)
    close(out, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu(torch_npu: Any, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 10, dtype=dtype)
    for dim in (-1, 1):
        gate, value = x.float().chunk(2, dim)
        close(torch_npu.npu_swiglu(x.to("npu"), dim=dim), (gate * torch.sigmoid(gate) * value).to(dtype))


@pytest.mark.parametrize("name", ["npu_scatter_pa_kv_cache", "_npu_reshape_and_cache"])
def test_kv_writes(torch_npu: Any, card: Any, name: str) -> None:
    caches = torch.randn(2, 4, 16, 2, 8)
    key, value = torch.randn(2, 3, 2, 8)
    slots = torch.tensor([17, 0, 63], dtype=torch.int32)
    expected = caches.clone()
    for new, cache in ((key, expected[0]), (value, expected[1])):
        for token, slot in enumerate(slots.tolist()):
            cache[slot // 16, slot % 16] = new[token]
    key_cache, value_cache = (cache.clone().to("npu") for cache in caches)
    rest = {"cache_mode": "Norm"} if name == "npu_scatter_pa_kv_cache" else {}
    card.next_step()
    assert (
        getattr(torch_npu, name)(key.to("npu"), value.to("npu"), key_cache, value_cache, slots.to("npu"), **rest)
        is None
    )
    counted = card.next_step()
    assert torch.equal(key_cache.cpu(), expected[0])
    assert torch.equal(value_cache.cpu(), expected[1])
    assert counted.bytes_moved == 2 * 2 * key.nbytes + slots.nbytes  # read and written, not the caches


def write(torch_npu: Any, **changes: Any) -> None:
    given: dict[str, Any] = dict(
        key=torch.randn(3, 2, 8),
        value=torch.randn(3, 2, 8),
        key_cache=torch.randn(4, 16, 2, 8),
        value_cache=torch.randn(4, 16, 2, 8),
        slot_mapping=torch.tensor([1, 2, 3]),
        cache_mode="Norm",
    )
    given |= changes
    torch_npu.npu_scatter_pa_kv_cache(
        **{name: value.to("npu") if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(cache_mode="PA_NZ"), "cache_mode 'PA_NZ'"),
        (dict(slot_mapping=torch.tensor([1.0, 2, 3])), "slot_mapping is torch.float32"),
        (dict(slot_mapping=torch.tensor([1, 2])), "a slot for each token"),
        (dict(key=torch.randn(2, 3, 8).transpose(0, 1)), "not contiguous"),
        (dict(key=torch.randn(3, 2, 8).half()), "one dtype"),
        (dict(key=torch.randn(3, 16)), "key is"),
        (dict(key_cache=torch.randn(4, 16, 16)), "a cache of"),
    ],
)
def test_kv_writes_that_it_does_not_take(torch_npu: Any, changes: dict[str, Any], why: str) -> None:
    write(torch_npu)
    with pytest.raises(DeviceRefusal, match=why):
        write(torch_npu, **changes)


def test_npu_a24_two_tokens_for_one_slot(torch_npu: Any) -> None:
    many = dict(key=torch.randn(17, 2, 8), value=torch.randn(17, 2, 8))
    write(torch_npu, **many, slot_mapping=torch.tensor([*range(16), 15]))  # more padding than the first block has slots
    for slots in ([15, 15, 20], [16, 20, 16]):
        with pytest.raises(DeviceRefusal, match="two tokens for one slot"):
            write(torch_npu, slot_mapping=torch.tensor(slots))


def test_slots_outside_of_the_cache(torch_npu: Any) -> None:
    for slot in (-1, 64):
        with pytest.raises(IndexError, match=f"index {slot} is out of range"):
            write(torch_npu, slot_mapping=torch.tensor([1, 2, slot]))
    caches, key = torch.randn(2, 4, 16, 2, 8).to("npu").unbind(0), torch.randn(3, 2, 8).to("npu")
    with pytest.raises(DeviceRefusal, match=r"slot_indices is torch.int64"):
        torch_npu._npu_reshape_and_cache(key, key, *caches, torch.tensor([1, 2, 3]).to("npu"))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda n, x: n.npu_rms_norm(x.flatten(), x[0]), "in 1 dimensions"),
        (lambda n, x: n.npu_rms_norm(x, x[0].half()), "gamma is torch.float16"),
        (lambda n, x: n.npu_rms_norm(x, x[0, :4]), "gamma's shape"),
        (lambda n, x: n.npu_rms_norm(x.long(), x[0]), "npu_rms_norm of torch.int64"),
        (lambda n, x: n.npu_add_rms_norm(x, x.half(), x[0]), "one dtype"),
        (lambda n, x: n.npu_add_rms_norm(x, x[:1], x[0]), "one shape"),
        (lambda n, x: n.npu_rotary_mul(x, x, x), "3 or 4 dimensions"),
        (lambda n, x: n.npu_rotary_mul(x[None], x[None], x[None].half()), "one float dtype"),
        (lambda n, x: n.npu_rotary_mul(x[None], x[None, :, :4], x[None, :, :4]), "a width of 8"),
        (lambda n, x: n.npu_rotary_mul(x[:, None], x[None], x[None]), "r1's shape"),
        (lambda n, x: n.npu_rotary_mul(x[None], x[None], x[None], "neox"), "rotary_mode 'neox'"),
        (lambda n, x: n.npu_swiglu(x.T), "contiguous: False"),
        (lambda n, x: n.npu_swiglu(x[:, :7].contiguous()), "along -1"),
        (lambda n, x: n.npu_swiglu(x[:0]), "along -1"),
    ],
)
def test_what_they_do_not_take(torch_npu: Any, call: Callable[[Any, torch.Tensor], Any], why: str) -> None:
    with pytest.raises(DeviceRefusal, match=why):
        call(torch_npu, torch.randn(2, 8).to("npu"))


def test_they_are_captured(torch_npu: Any) -> None:
    x, gamma = torch.randn(2, 8).to("npu"), torch.randn(8).to("npu")
    cache = torch.zeros(1, 16, 1, 4, device="npu")
    slots = torch.tensor([5, 6]).to("npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        normed = torch_npu.npu_add_rms_norm(x, x, gamma)[0]
        new = torch_npu.npu_swiglu(normed).view(2, 1, 4)
        torch_npu.npu_scatter_pa_kv_cache(new, new, cache, cache, slots, cache_mode="Norm")
    for _ in range(2):
        x.normal_()
        slots.add_(1)
        graph.replay()
        expected = torch_npu.npu_swiglu(torch_npu.npu_add_rms_norm(x, x, gamma)[0])
        assert torch.equal(cache[0, :, 0][slots].cpu(), expected.cpu())


def test_host_tensors_are_refused(torch_npu: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch_npu.npu_swiglu(torch.randn(2, 8))
    with pytest.raises(RuntimeError, match="same device"):
        torch_npu.npu_rms_norm(torch.randn(2, 8).to("npu"), torch.randn(8))
