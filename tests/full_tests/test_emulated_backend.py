"""The Gaudi backend's own parts, on the emulated card: kernels against plain torch, KV memory, copies."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, FlatBlocks
from vllm_gaudi_spec.backends import load_backend
from vllm_gaudi_spec.config import UnsupportedConfigError

pytestmark = pytest.mark.emulated

BLOCK = 128


@pytest.fixture(scope="module")
def hpu() -> Any:
    return load_backend()


def on_card(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("hpu")


@torch.inference_mode()
def test_fused_norms(hpu: Any) -> None:
    from vllm import ir

    from vllm_gaudi_spec.backends import hpu_layers

    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    for op, inputs in ((ir.ops.rms_norm, (x,)), (ir.ops.fused_add_rms_norm, (x, residual))):
        plain = op.impls["native"].impl_fn(*inputs, weight, 1e-5)
        kernel = op.impls[hpu_layers.PROVIDER].impl_fn(*map(on_card, inputs), on_card(weight), 1e-5)
        for one, other in zip(as_tuple(kernel), as_tuple(plain), strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@torch.inference_mode()
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_fused_rotary_embedding(hpu: Any, neox: bool, rotary_dim: int) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from vllm_gaudi_spec.backends import hpu_layers  # noqa: F401

    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(64, rotary_dim, 512, 10_000.0, neox, torch.float32)
    assert type(layer).__name__ == "HpuRotaryEmbedding"
    positions = torch.tensor([0, 3, 511, 17])
    query, key = torch.randn(4, 3 * 64), torch.randn(4, 64)
    plain = layer.forward_native(positions, query.clone(), key.clone())
    layer = layer.to("hpu")
    fused = layer.forward_oot(on_card(positions), on_card(query), on_card(key))
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)


def layer_spec(**changes: Any) -> AttentionLayerSpec:
    common = dict(num_heads=4, num_kv_heads=2, head_size=64, scale=0.125, sliding_window=None, logits_soft_cap=0.0)
    return AttentionLayerSpec(**(common | changes), dtype=torch.float32, block_size=BLOCK)


def kv_plan(layers: list[dict[str, Any]], num_blocks: int) -> Any:
    """Layers by KV cache tensor, as vLLM plans them: those of one place lie over each other."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    groups, tensors = [], []
    for layer in layers:
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=layer["heads"], head_size=layer["size"], dtype=torch.float32
        )
        page = spec.page_size_bytes
        groups.append(KVCacheGroupSpec([layer["name"]], spec))
        tensors.append(KVCacheTensor(1 << 30, [layer["name"]], page * num_blocks, page, layer["place"]))
    return KVCacheConfig(num_blocks, tensors, groups)


@torch.inference_mode()
def test_layers_at_one_place_share_their_kv(hpu: Any) -> None:
    layers = [dict(name=n, heads=2, size=64, place=p) for n, p in (("a", 0), ("b", 4096), ("c", 0))]
    found = hpu.allocate_kv(kv_plan(layers, 3), None)
    assert found["a"] is found["c"]
    assert found["a"].keys is not found["b"].keys
    assert found["a"].keys.shape == (3 * BLOCK, 2, 64)
    layers[2]["size"] = 32
    with pytest.raises(UnsupportedConfigError, match="c shares KV memory with a layer of another shape"):
        hpu.allocate_kv(kv_plan(layers, 3), None)


@torch.inference_mode()
def test_blocks_are_copied_in_all_layers(hpu: Any) -> None:
    found = hpu.allocate_kv(
        kv_plan([dict(name=n, heads=1, size=8, place=p) for n, p in (("a", 0), ("b", 9))], 12), None
    )
    for number, pair in enumerate(found.values()):
        for tensor in (pair.keys, pair.values):
            tensor.copy_(on_card(torch.arange(12.0).repeat_interleave(BLOCK)[:, None, None].expand(-1, 1, 8) + number))
    pairs = [(1, 5), *((2, target) for target in range(6, 12))]
    copy = hpu.block_copier(found)
    copy(pairs)
    copy(pairs[:2])
    for number, pair in enumerate(found.values()):
        for tensor in (pair.keys, pair.values):
            assert (tensor.cpu()[::BLOCK, 0, 0] - number).tolist() == [0, 1, 2, 3, 4, 1, 2, 2, 2, 2, 2, 2]


@torch.inference_mode()
@pytest.mark.parametrize("changes", [{}, dict(sliding_window=70), dict(logits_soft_cap=5.0)])
def test_prompt_chunks_and_decodes_against_plain_attention(hpu: Any, changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    spec = layer_spec(**changes)
    keys, values = torch.randn(2, 6 * BLOCK, 2, 64).unbind(0)
    table, starts = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32), torch.tensor([130, 4], dtype=torch.int32)
    queries = 8
    query = torch.randn(2 * queries, 4, 64)
    expected = torch.empty_like(query)
    call = AttentionCall(num_rows=2, num_queries=queries, starts_B=starts, block_table_BW=table)
    padded.attend(query, *(kv.unflatten(0, (-1, BLOCK)) for kv in (keys, values)), call, spec, expected)

    from vllm_gaudi_spec.backends.hpu import KVPair

    pair = KVPair(on_card(keys), on_card(values), BLOCK)
    listed = FlatBlocks(
        *(on_card(torch.tensor(ids, dtype=torch.int32)) for ids in ([3, 5, 1, 0], [0, 1, 0, 2], [0, 0, 1, 0]))
    )
    for flat in (None, listed):
        out = on_card(torch.empty_like(query))
        same = AttentionCall(
            num_rows=2, num_queries=queries, starts_B=on_card(starts), block_table_BW=on_card(table), flat=flat
        )
        hpu.attend(on_card(query), pair, same, spec, out)
        torch.testing.assert_close(out.cpu(), expected, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_results_are_on_their_way_before_the_next_program_overwrites_them(hpu: Any) -> None:
    program = hpu.graph(lambda x: x + 1)
    first = program(hpu.upload(torch.tensor([1, 2])))
    arrives = hpu.start_download(first)
    second = program(hpu.upload(torch.tensor([10, 20])))
    assert second is first, "a graph has one place for its results"
    assert arrives().tolist() == [2, 3]
    assert hpu.start_download(second)().tolist() == [11, 21]


@torch.inference_mode()
def test_programs_are_told_apart_by_shapes_and_static_values(hpu: Any) -> None:
    calls: list[int] = []

    def scale(pair: tuple[torch.Tensor, int]) -> torch.Tensor:
        calls.append(pair[1])
        return pair[0] * pair[1]

    program = hpu.graph(scale)
    for number, factor in ((1, 2), (5, 2), (1, 3), (1, 2)):
        assert program((hpu.upload(torch.tensor([number])), factor)).cpu().tolist() == [number * factor]
    program((hpu.upload(torch.tensor([1, 1])), 2))
    assert calls == [2, 3, 2], "captured for each factor and each shape, replayed otherwise"


def test_no_front_end_opens_the_card() -> None:
    """What vLLM asks before it starts its engine process: an open card would not be free for that."""
    code = """
import torch
from vllm_gaudi_spec import emulator
emulator.install()
def opened(*args): raise AssertionError("the card was opened")
for name in ("Stream", "Event", "mem_get_info", "synchronize", "current_stream"):
    setattr(torch.hpu, name, opened)
from vllm.platforms import current_platform
from vllm_gaudi_spec.backends import load_backend
load_backend()
current_platform.import_ir_kernels()
assert current_platform.get_device_name() == "hpu-emulated"
assert emulator.device().pid == 0
print("closed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["closed"], done.stderr
    from vllm.platforms import current_platform

    assert current_platform.get_device_total_memory() == 0
    assert not current_platform.is_pin_memory_available()
    assert current_platform.device_type == "hpu"
