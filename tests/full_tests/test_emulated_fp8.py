"""On the emulated Gaudi: measured and in FP8 as on the CPU, and KV alone in FP8, with all programs made in warm-up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

import card_emulator
from tests.full_tests import heads, mtp_checkpoints
from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.quantized import METHODS, Calibrated, calibrate, check_drafts, drafter, drafting, quantizing
from tests.full_tests.quantized_checkpoints import MTP, rewritten, texts_with_and_without_drafts
from tests.full_tests.speculation import accepted
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.config import NATIVE
from vllm_gaudi_spec.devices.hpu import backend as hpu

pytestmark = pytest.mark.emulated

# Few shapes: each is a program, for every branch of sampling.
SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=128, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def calibrated(looping_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """`engine` sees to it that nothing was compiled behind warm-up."""
    return calibrate(tmp_path_factory.mktemp("scales"), looping_llama, drafting(looping_llama), **SIZES)


@pytest.mark.parametrize("method", quick_and_slow(METHODS[1:2], METHODS))
def test_drafts_are_lossless_in_fp8(method: str, looping_llama: str, calibrated: Calibrated) -> None:
    """Decodes over lists of blocks, prompt chunks over tables, a verify rectangle of four queries."""
    draft = drafter(calibrated.serving("draft", method))
    with (
        quantizing(calibrated.serving("target", method)),
        engine(looping_llama, speculative_config=drafting(looping_llama), **draft, **SIZES) as llm,
    ):
        check_drafts(llm, 20, 4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts_are_lossless_with_kv_in_fp8(method: str, looping_llama: str) -> None:
    """Lists of blocks, and prompt chunks by the fused kernel over tables."""
    model, speculative = looping_llama, drafting(looping_llama)
    if method == "eagle":
        model, speculative = heads.target(method), heads.head(method, 3, rejection_sample_method="strict")
    with engine(model, speculative_config=speculative, kv_cache_dtype="fp8", **SIZES) as llm:
        check_drafts(llm, 20 if method == "draft_model" else 0, 4)


@pytest.mark.slow
def test_kv_in_fp8_takes_half_the_memory(looping_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the card's own count, of the target and a drafter, and in what is planned with."""
    taken: list[int] = []

    def counted(memory: Any, *args: Any) -> Any:
        before = card_emulator.device().in_use
        caches = allocate(memory, *args)
        taken.append(card_emulator.device().in_use - before)
        return caches

    allocate = hpu.HpuMemory.allocate_kv
    monkeypatch.setattr(hpu.HpuMemory, "allocate_kv", counted)
    bytes_of_a_token = {}
    for kv_dtype in ("auto", "fp8"):
        options = SIZES | dict(dtype="bfloat16", kv_cache_dtype=kv_dtype, speculative_config=drafting(looping_llama))
        with engine(looping_llama, **options) as llm:
            cache = llm.llm_engine.vllm_config.cache_config
            bytes_of_a_token[kv_dtype] = taken[-1] / (cache.num_gpu_blocks * cache.block_size)
    layers, kv_heads, head_size = 4, 2, 32
    assert bytes_of_a_token == {"auto": 2 * layers * kv_heads * head_size * 2, "fp8": 2 * layers * kv_heads * head_size}


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fp8_weights_stay_fp8(num_ranks: int, looping_llama: str, tmp_path: Path) -> None:
    quantized, _ = rewritten(looping_llama, "ct-fp8-dynamic", tmp_path)
    fp8 = {torch.float8_e4m3fn}
    texts_with_and_without_drafts(quantized, NATIVE, kept_as=fp8, tensor_parallel_size=num_ranks)


@pytest.mark.slow
def test_deepseek_mtp_in_fp8_blocks(tmp_path: Path) -> None:
    """DeepSeek-V3 is published in this form. The matrices that latent attention absorbs are dequantized."""
    quantized, _ = rewritten(mtp_checkpoints.save("deepseek-v3", tmp_path / "plain"), "fp8-block", tmp_path)
    kept = {torch.float8_e4m3fn, torch.float32}
    texts_with_and_without_drafts(quantized, NATIVE, speculative=MTP, least=5, kept_as=kept)


def output_matrices(worker: Any) -> list[torch.Tensor]:
    """Return the numbers of a head's output matrix and of the FP8 copy beside it."""
    head, target = worker.model_runner.drafter.model, worker.model_runner.target.model
    (copy,) = head.fp8_output_matrices
    original = target.lm_head.weight if hasattr(target, "lm_head") else target.model.embed_tokens.weight
    # On the host: the card would compile these operations.
    return [original.cpu(), copy.weight.cpu().float().t() * copy.weight_scale.cpu()[:, None]]


def spoil(worker: Any) -> None:
    for matrix in worker.model_runner.drafter.model.fp8_output_matrices:
        matrix.weight.data.copy_(torch.zeros(matrix.weight.shape))  # a copy, which the card does not compile


@pytest.mark.parametrize("method", quick_and_slow(["eagle"], ["mtp", "dflash"]))
def test_drafts_of_an_fp8_output_matrix_are_lossless(method: str) -> None:
    """The target verifies with its own matrix, and its new weights reach the copy."""
    model, prompts = heads.target(method), [heads.text(length, first) for first, length in enumerate((9, 20, 31, 40))]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(2)]
    params += [heads.greedy(24)] * 2

    def ask(llm: LLM) -> list[list[int]]:
        llm.reset_prefix_cache()
        return first_tokens(generate(llm, prompts, params))

    with engine(model, **SIZES) as llm:
        expected = ask(llm)
    drafts = heads.head(method, 3, rejection_sample_method="strict", draft_lm_head_quantization="fp8")
    with engine(model, speculative_config=drafts, **SIZES) as llm:
        ((original, copy),) = llm.collective_rpc(output_matrices)
        # e4m3 numbers have 4 significant bits, except for the smallest ones.
        assert 0.01 < float((copy - original).abs().max() / original.abs().max()) < 2**-4
        assert ask(llm) == expected
        assert accepted(llm) > 0.1 * counter(llm, "vllm:spec_decode_num_draft_tokens") > 5
        if method == "dflash":  # no weights are updated with it
            return
        llm.collective_rpc(spoil)
        llm.collective_rpc("reload_weights")
        assert ask(llm) == expected
        for before, after in zip((original, copy), llm.collective_rpc(output_matrices)[0], strict=True):
            assert torch.equal(before, after)
