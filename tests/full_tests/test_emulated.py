"""On an emulated card: what every way of drafting promises, with all programs made in warm-up.

Runs with VGS_DEVICE=hpu-emulated or ascend-emulated in a process of its own: the emulated card changes torch for good.
"""

import csv
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

import card_emulator
from tests.full_tests import never_wrong, poison, rule_models
from tests.full_tests.captured import Reference, captured, programs_are_the_manifest, signatures
from tests.full_tests.engines import KV_CACHE_BYTES, SMALL_KV, counter, engine, first_tokens, generate, preemptions
from tests.full_tests.ranks import ranks_agree
from tests.full_tests.speculation import MODES, accepted, ngram, speculating, suffix
from tests.full_tests.workload import Request, run_together
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.device_table import describe_device, load_backend
from vllm_gaudi_spec.environment import gaudi_is_lazy
from vllm_gaudi_spec.scheduling.adaptive import StepTimes
from vllm_gaudi_spec.self_test import run

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("own_cache")]

# Few rows: each size of a batch is a program for every branch of sampling.
SIZES: dict[str, Any] = dict(max_num_seqs=6, max_model_len=512, max_num_batched_tokens=256)
BOTH = dict(SIZES, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def alone(looping_llama: str, requests: list[Request]) -> Reference:
    with engine(looping_llama, **SIZES) as llm:
        return Reference.of(llm, requests)


@pytest.mark.every_card
def test_device_is_emulated() -> None:
    modes = {"hpu-emulated": "lazy" if gaudi_is_lazy() else "compiled", "ascend-emulated": "captured"}
    found = describe_device()
    assert found["mode"] == modes[found["device"]]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ngram": (ngram(3), BOTH | dict(block_size=16)),  # so small that rows have entries of several blocks
    "suffix, preempted": (suffix(5), SIZES | SMALL_KV | dict(block_size=32, enable_prefix_caching=False)),
}


@pytest.mark.parametrize("case", quick_and_slow(["ngram"], CASES))
def test_drafters_without_a_model_are_lossless(
    case: str, looping_llama: str, requests: list[Request], alone: Reference
) -> None:
    config, options = CASES[case]
    before = captured()
    with speculating(looping_llama, config, **options) as llm:
        programs_are_the_manifest(llm, before)
        alone.check(requests, run_together(llm, requests))
        assert accepted(llm) > 50
        reads_once(llm)
        if "preempted" in case:
            assert preemptions(llm) > 0


@pytest.mark.slow  # drafters that are models: test_emulated_models.py, and the universal one below
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_draft_model_is_lossless(mode: str, looping_llama: str, requests: list[Request], alone: Reference) -> None:
    """The target drafts for itself: what it drafts for greedy requests, and with the same noise, is right."""
    config = dict(method="draft_model", model=looping_llama, num_speculative_tokens=3, **MODES[mode])
    before = captured()
    with speculating(looping_llama, config, **BOTH) as llm:
        programs_are_the_manifest(llm, before)
        alone.check(requests, run_together(llm, requests))
        assert accepted(llm) > 0.4 * counter(llm, "vllm:spec_decode_num_draft_tokens")
        reads_once(llm)


def test_every_number_of_drafts_is_lossless(
    looping_llama: str, requests: list[Request], alone: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adaptive verification with random choices: each number of drafts has graphs of its own, made in warm-up."""
    rng = random.Random(0)
    monkeypatch.setattr(StepTimes, "choose", lambda times, *args, **named: rng.choice(times._choices))
    config = dict(method="draft_model", model=looping_llama, num_speculative_tokens=4)
    config |= MODES["block"]
    few, before = requests[:16], captured()
    # There are many graphs for each number of rows. Without a prefix cache, KV is read in place.
    options = SIZES | dict(max_num_seqs=2, enable_prefix_caching=False)
    with speculating(looping_llama, config | dict(enable_adaptive_verification=True), **options) as llm:
        programs_are_the_manifest(llm, before)
        decodes = [signature for signature in signatures(llm) if signature[0] == "decode"]
        assert {signature[2] for signature in decodes} == {1, 2, 3, 5}
        assert {signature[1] for signature in decodes if signature[4]} == {1, 2}, "rows whose KV is read in place"
        Reference(alone.answers[:16], alone.scores).check(few, run_together(llm, few), only_greedy=True)
        assert accepted(llm) > 0.4 * counter(llm, "vllm:spec_decode_num_draft_tokens") > 20
        reads_once(llm)


def test_sleep_and_new_weights_compile_nothing(looping_llama: str, cousin: str) -> None:
    """Graphs of lazy mode hold addresses, and take new numbers in place; compiled regions take tensors."""
    config = dict(method="draft_model", model=looping_llama, num_speculative_tokens=2)
    prompts, params = [[5, 6, 7], [9, 3, 200, 41]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    buckets = dict(prefill_buckets=[32], batch_buckets=[2], block_buckets=[2])
    options = SIZES | dict(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=64)
    options |= dict(additional_config=dict(gaudi_spec=buckets))
    texts = {}
    for model in (looping_llama, cousin):
        with engine(model, **options) as llm:
            texts[model] = first_tokens(generate(llm, prompts, params))
    with engine(looping_llama, speculative_config=config, **options) as llm:

        def check(model: str) -> None:
            llm.reset_prefix_cache()
            assert first_tokens(generate(llm, prompts, params)) == texts[model]

        check(looping_llama)
        regions = report(llm)["device"].get("regions")
        for level in (1, 2, 1):
            if gaudi_is_lazy():
                with pytest.raises(UnsupportedConfigError, match="hpu-emulated in lazy mode, whose graphs"):
                    llm.sleep(level=level)
            else:
                held = memory_held()
                llm.sleep(level=level)
                assert held - memory_held() > KV_CACHE_BYTES
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            check(looping_llama)
        for model in (cousin, looping_llama):
            llm.collective_rpc("reload_weights", kwargs=dict(weights_path=model))
            check(model)
        assert report(llm)["device"].get("regions") == regions
        reads_once(llm)


def memory_held() -> int:
    gc.collect()
    return int(torch.get_device_module("hpu").memory_allocated())


@pytest.mark.every_card
def test_head_of_the_rule_is_never_wrong(tmp_path: Path) -> None:
    """Over blocks and contexts of all sizes, past its own limit, and through blocks that the prefix cache shares: were
    one slot not listed, a draft would be wrong. Nor where what is no number was in each block before, or is in another
    row of the batch."""
    model = str(rule_models.make_target(tmp_path / "target"))
    poison.poison(model, float("nan"))
    config = dict(method="eagle3", model=str(rule_models.make_eagle3(tmp_path / "head")), num_speculative_tokens=5)
    buckets = dict(prefill_buckets=[24, 64], batch_buckets=[1, 3], block_buckets=[1, 2, 6])
    before = captured()
    few_blocks = dict(kv_cache_memory_bytes=4 << 20)
    options = never_wrong.SIZES | few_blocks | dict(additional_config=dict(gaudi_spec=buckets))
    with speculating(model, config | never_wrong.LIMIT, **options) as llm:
        programs_are_the_manifest(llm, before)
        passed_its_self_test(llm)
        for _ in range(2):
            never_wrong.ask(llm)
        poison.fill(llm)
        never_wrong.ask(llm, beside=[poison.REQUEST])
        reads_once(llm)


UNIVERSAL: dict[str, dict[str, Any]] = {
    "map": {},
    "retokenize": dict(universal_context="retokenize"),
    "slem": dict(universal_context="retokenize", universal_match="slem"),
}


@pytest.mark.parametrize("how", quick_and_slow(["slem"], ("map", "retokenize")))
def test_universal_drafter_is_lossless(
    how: str, looping_llama: str, twin: str, requests: list[Request], alone: Reference
) -> None:
    config = dict(method="universal_draft", model=twin, num_speculative_tokens=3)
    options = dict(additional_config=dict(gaudi_spec=UNIVERSAL[how]))
    before = captured()
    with speculating(looping_llama, config, **BOTH, **options) as llm:
        programs_are_the_manifest(llm, before)
        alone.check(requests, run_together(llm, requests))
        assert accepted(llm) > 50
        reads(llm, 2 if how == "slem" else 1)


def test_two_cards_decide_alike(looping_llama: str, requests: list[Request], alone: Reference) -> None:
    """Tensor parallel: collectives inside the captured programs, and ranks that decide alike without telling."""
    with speculating(looping_llama, ngram(3), **SIZES, tensor_parallel_size=2) as llm:
        alone.check(requests, run_together(llm, requests))
        assert accepted(llm) > 50
        ranks_agree(llm, 2)
        for rank in llm.collective_rpc("step_report"):
            assert rank["device"]["emulator"]["total"]["collectives"] > 0
            assert rank["graphs"]["after_warmup"] == rank["device"]["compiled_after_warmup"] == 0


def report(llm: LLM) -> dict[str, Any]:
    return llm.collective_rpc("step_report")[0]


def reads_once(llm: LLM) -> None:
    reads(llm, 1)


def reads(llm: LLM, most: int) -> None:
    steps = report(llm)
    assert steps["host_syncs_per_step"] <= most
    card = steps["device"]["emulator"]
    assert (card["total"]["dynamic_ops"], card["total"]["fallbacks"]) == (0, 0)
    if describe_device()["device"] == "ascend-emulated":
        # By its own count too: what an operation copies to the host by itself would be seen there alone.
        served = card["steps"][-steps["steps"] :]
        assert sum(step["host_reads"] for step in served) <= most * len(served)
        # Its results are polled for, so nothing waits in a step, unless one took seconds.
        assert sum(step["syncs"] for step in served) <= len(served) // 8
    elif gaudi_is_lazy():
        operators_have_evidence()


def operators_have_evidence() -> None:
    """A Gaudi is known to run every operator of this process's graphs. The table says by which evidence: that of
    hpu_op.yaml, or of another file with a line, of Habana's bridge 1.19.0 unless it names another project.

    | registered | the bridge |
    | --- | --- |
    | listed | lists the operator and these dtypes |
    | asked | lists the operator and asks its kernel library, which is closed, about dtypes |
    | whole | has code of its own for the operator |
    | parts | runs the named operators in its place |
    | used | runs it for others on cards |
    """
    with (Path(__file__).parent / "gaudi_operators.csv").open() as file:
        known = {(row["operator"], dtype) for row in csv.DictReader(file) for dtype in row["dtypes"].split()}
    found = card_emulator.device().operators
    assert found, "graphs in another process"
    assert not found - known


def passed_its_self_test(llm: LLM) -> None:
    """What the worker ran before it loaded its model."""
    (found,) = llm.collective_rpc(lambda worker: worker.self_test.as_json())
    assert found["passed"], found
    missing = [check["name"] for check in found["checks"] if check["status"] != "passed"]
    assert missing == [*([] if load_backend().weights.fp8_arithmetic else [run.FP8_KV]), run.COLLECTIVES]
