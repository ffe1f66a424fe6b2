"""On the emulated Gaudi: latent attention and experts say what transformers says, with all programs made in warm-up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.tiny_models import VOCAB
from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, FlatBlocks
from vllm_gaudi_spec.backends import describe_device, load_backend

pytestmark = pytest.mark.emulated

BLOCK, SIZE, VALUE = 128, 56, 40
SIZES: dict[str, Any] = dict(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=256)


@torch.inference_mode()
def test_keys_that_hold_their_values() -> None:
    """Allocated without values, copied, and read by chunks and by lists."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec

    hpu: Any = load_backend()
    kv_spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=SIZE, dtype=torch.float32)
    page = kv_spec.page_size_bytes
    plan = KVCacheConfig(8, [KVCacheTensor(8 * page, ["a"], 8 * page, page, 0)], [KVCacheGroupSpec(["a"], kv_spec)])
    found = hpu.allocate_kv(plan, None)
    pair = found["a"]
    assert pair.values is None
    assert pair.keys.shape == (8 * BLOCK, 1, SIZE)
    assert pair.keys.nbytes == 8 * page

    torch.manual_seed(0)
    keys, query, queries = torch.randn(8 * BLOCK, 1, SIZE), torch.randn(2 * 4, 5, SIZE), 4
    spec = AttentionLayerSpec(
        num_heads=5,
        num_kv_heads=1,
        head_size=SIZE,
        scale=0.2,
        sliding_window=None,
        logits_soft_cap=0.0,
        dtype=torch.float32,
        block_size=BLOCK,
        value_size=VALUE,
    )
    hpu.write_kv(keys.to("hpu"), None, pair, torch.arange(8 * BLOCK).to("hpu"), spec)
    hpu.block_copier(found)([(3, 6)])
    keys = keys.unflatten(0, (8, BLOCK))
    keys[6] = keys[3]
    table, starts = torch.tensor([[6, 1], [5, 0]], dtype=torch.int32), torch.tensor([130, 4], dtype=torch.int32)
    call = AttentionCall(num_rows=2, num_queries=queries, starts_B=starts, block_table_BW=table)
    expected = torch.empty(2 * queries, 5, VALUE)
    padded.attend(query, keys, None, call, spec, expected)
    listed = FlatBlocks(
        *(torch.tensor(ids, dtype=torch.int32).to("hpu") for ids in ([6, 5, 1, 0], [0, 1, 0, 2], [0, 0, 1, 0]))
    )
    for flat in (None, listed):
        out = torch.empty(2 * queries, 5, VALUE).to("hpu")
        same = AttentionCall(
            num_rows=2, num_queries=queries, starts_B=starts.to("hpu"), block_table_BW=table.to("hpu"), flat=flat
        )
        hpu.attend(query.to("hpu"), pair, same, spec, out)
        torch.testing.assert_close(out.cpu(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_lite", "mixtral", "qwen3_moe")),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    family: str, tiny: Callable[[str], str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_device()["device"] == "hpu-emulated"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Within a block, over a block's end, and in two chunks of which the second reads the first; the last two share it.
    prompts = random_prompts([5, 120, 300], VOCAB)
    prompts.append(prompts[-1][:290] + prompts[0])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with engine(tiny(family), enable_prefix_caching=True, **SIZES) as llm:
        outputs = first_tokens(generate(llm, prompts[:-1], params)) + first_tokens(generate(llm, prompts[-1:], params))
        assert counter(llm, "vllm:prefix_cache_hits") > 0
    reference, tally = Reference(tiny(family)), Tally()
    for prompt, output in zip(prompts, outputs, strict=True):
        tally.greedy(f"{family}, prompt of {len(prompt)}", output, reference.logits_after(prompt, output))
    tally.check()
