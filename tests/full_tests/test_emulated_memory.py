"""On an emulated card with little memory: warm-up says what graphs keep, and which option to lower where it ends."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

import card_emulator
from tests.full_tests.captured import captured, programs_are_the_manifest
from tests.full_tests.engines import engine
from tests.full_tests.speculation import ngram, suffix
from tests.full_tests.tiny_models import VOCAB
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec import worker
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.device_table import choose_device, load_backend
from vllm_gaudi_spec.graphs import DRAFTERS_READS, DRAFTS
from vllm_gaudi_spec.runner import profile
from vllm_gaudi_spec.runner.model_runner import ModelRunner
from vllm_gaudi_spec.runner.profile import peak_bytes

pytestmark = pytest.mark.emulated

MIB = 1 << 20
SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=256, max_num_batched_tokens=128, kv_cache_memory_bytes=None)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    load_backend()  # puts the card in place, from the cache of before: what is below torch_npu is compiled into it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VGS_SELF_TEST", "0")  # which wants more memory than this
    yield card_emulator.counted()
    # An engine that did not start leaves its groups of ranks, and the next one may need others.
    destroy_model_parallel()
    destroy_distributed_environment()


def start(model: str, **options: Any) -> Any:
    return engine(model, **dict(speculative_config=ngram(2)) | SIZES | options)


def shrink(card: Any, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """To what is in use, and so much more. Each start is one of a new process, which nothing ended yet, and whose
    allocator keeps nothing."""
    gc.collect()
    getattr(torch, load_backend().traits.torch_device.type).empty_cache()
    monkeypatch.setattr(card, "blocked", None, raising=False)
    monkeypatch.setattr(card, "memory_limit", card.in_use + card.graph_bytes + num_bytes)


@pytest.mark.parametrize("method", quick_and_slow(["ngram"], ("suffix", "retokenize")))
def test_r01_the_largest_steps_run_before_the_kv_cache_is_sized(
    method: str, looping_llama: str, twin: str, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of drafters on the device too, of whose memory nothing is left either."""
    found: list[tuple[int, int]] = []
    kinds: dict[str, int] = {}
    peaks = profile._peaks
    monkeypatch.setattr(profile, "_peaks", lambda *args: (kinds.update(peaks(*args)), kinds)[1])

    def noted(runner: ModelRunner, budget: int) -> int:
        before = (card.in_use, card.graph_bytes, len(card.graphs), set(vars(runner)))
        found.append((peak_bytes(runner, budget), budget))
        assert (card.in_use, card.graph_bytes, len(card.graphs), set(vars(runner))) == before, "nothing is left"
        return found[0][0]

    drafter = suffix(2) if method == "suffix" else ngram(2)
    if method == "retokenize":
        drafter = dict(method="universal_draft", model=twin, num_speculative_tokens=2)
    own = dict(gaudi_spec=dict(universal_context=method)) if method == "retokenize" else {}
    shrink(card, monkeypatch, 64 * MIB)
    monkeypatch.setattr(worker, "peak_bytes", noted)
    before = captured()
    with start(looping_llama, speculative_config=drafter, additional_config=own) as llm:
        (kv,) = llm.collective_rpc(lambda worker: worker.model_runner.kv_cache.num_bytes)
        programs_are_the_manifest(llm, before)
    ((peak, budget),) = found
    assert peak > 2 * 3 * VOCAB * 4, "at least the scores of two rows of three"
    assert 0.9 * (budget - peak) < kv <= budget - peak
    # N-grams draft in the sampling pass.
    assert (DRAFTS in kinds, DRAFTERS_READS in kinds) == (method == "retokenize", method == "retokenize")


@pytest.mark.slow
@pytest.mark.skipif(choose_device() == "ascend-emulated", reason="an NPU's reserve for graphs cannot be set to nothing")
def test_l29_r08_memory_that_ends_in_warm_up(looping_llama: str, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start names a smaller value, with what is known by then of what graphs keep, until one serves."""
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0")
    shares = [1.0]
    while (words := served_with(looping_llama, card, monkeypatch, shares[-1])) is not None:
        found = re.search(r"in warm-up, in run \d+ of \d+ .*; lower --gpu-memory-utilization (.*) -> (.*)\.$", words)
        assert found, words
        assert float(found[1]) == shares[-1]
        shares.append(float(found[2]))
        assert 0.5 < shares[-1] < shares[-2]
        assert len(shares) < 8
    assert len(shares) > 1


def served_with(model: str, card: Any, monkeypatch: pytest.MonkeyPatch, utilization: float) -> str | None:
    """Why it does not start; None where it does."""
    gc.collect()  # the engine before
    with monkeypatch.context() as patch:
        shrink(card, patch, 24 * MIB)
        try:
            with start(model, gpu_memory_utilization=utilization, max_num_seqs=1):
                return None
        except UnsupportedConfigError as error:
            return str(error)


def test_memory_that_ends_in_the_profile_run(looping_llama: str, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(card, monkeypatch, 32 * MIB)
    words = r"ran out of memory in the profile run.*; lower --max-num-batched-tokens 4096 -> 2048\.$"
    with pytest.raises(UnsupportedConfigError, match=words):
        start(looping_llama, max_num_batched_tokens=4096, max_model_len=4096).__enter__()
