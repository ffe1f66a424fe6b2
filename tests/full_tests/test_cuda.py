"""On a GPU: what ways of drafting promise, with all programs captured in warm-up and no wait but the counted read.

Runs with VGS_DEVICE=cuda, where there is a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.full_tests import heads, mtp_checkpoints, never_wrong, rule_models, test_parallel_drafting
from tests.full_tests import reference as transformers_reference
from tests.full_tests.block_drafters import KINDS, make_drafter
from tests.full_tests.captured import Reference, captured, programs_are_the_manifest
from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.parallel_checkpoints import MASK
from tests.full_tests.ranks import ranks_agree
from tests.full_tests.speculation import METHODS, MODES, accepted, ngram, record_drafts, speculating
from tests.full_tests.test_block_drafters import TARGET, check_drafts_on_card
from tests.full_tests.test_mtp import check_every_draft
from tests.full_tests.workload import Request, run_together
from tests.support.releases import only_0_32
from vllm_gaudi_spec.device_table import describe_device

pytestmark = pytest.mark.cuda

SIZES: dict[str, Any] = dict(max_num_seqs=6, max_model_len=512, max_num_batched_tokens=256)
BOTH = dict(SIZES, enable_prefix_caching=True)
FP8_LOGITS = {"fp8": dict(draft_lm_head_quantization="fp8")}


@pytest.fixture(scope="module")
def alone(looping_llama: str, requests: list[Request]) -> Reference:
    with engine(looping_llama, **SIZES) as llm, never_waiting():
        return Reference.of(llm, requests)


@contextmanager
def never_waiting() -> Iterator[None]:
    """Anything that makes the host wait for the GPU raises here, save waiting for a copy that was begun before."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_noticed() -> None:
    with never_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


def test_device_is_cuda() -> None:
    assert describe_device() == {"device": "cuda", "mode": "captured"}


# A drafter on the host does not let steps overlap.
@pytest.mark.parametrize(("method", "overlapping"), [("suffix", False), ("ngram", False), ("ngram", True)])
def test_drafters_without_a_model_are_lossless(
    method: str, overlapping: bool, looping_llama: str, requests: list[Request], alone: Reference
) -> None:
    before = captured()
    with speculating(looping_llama, METHODS[method](3), **BOTH, async_scheduling=overlapping) as llm:
        programs_are_the_manifest(llm, before)
        with never_waiting():
            alone.check(requests, run_together(llm, requests))
        assert accepted(llm) > 50
        reads_once(llm)


@pytest.mark.parametrize(
    ("method", "mode", "overlapping"),
    [
        *(("draft_model", mode, overlapping) for mode in ("greedy", "coupled") for overlapping in (False, True)),
        ("draft_model", "standard", True),
        ("draft_model", "block", True),
        ("draft_model", "fp8", True),
        ("universal_draft", "greedy", True),
        ("universal_draft", "standard", False),
    ],
)
def test_draft_model_is_lossless(
    method: str,
    mode: str,
    overlapping: bool,
    looping_llama: str,
    requests: list[Request],
    alone: Reference,
    request: pytest.FixtureRequest,
) -> None:
    """The target drafts for itself, or its twin of another vocabulary does: what it drafts for greedy requests, and
    with the same noise or law, is right."""
    drafter = looping_llama if method == "draft_model" else request.getfixturevalue("twin")
    config = dict(method=method, model=drafter, num_speculative_tokens=3, **(MODES | FP8_LOGITS)[mode])
    before = captured()
    with speculating(looping_llama, config, **BOTH, async_scheduling=overlapping) as llm:
        programs_are_the_manifest(llm, before)
        with never_waiting():
            # With drafts that have a law, what is drawn follows the target's and is not the same token by token.
            alone.check(requests, run_together(llm, requests), only_greedy=mode in ("standard", "block"))
        assert accepted(llm) > 0.4 * counter(llm, "vllm:spec_decode_num_draft_tokens")
        reads_once(llm)


# Prompts of all lengths, drawn so hot that every third token breaks the rule.
DRAWN = rule_models.prompts(6, length=40, seed=3)
DRAWN_PARAMS = [
    SamplingParams(temperature=1.5, seed=seed, max_tokens=40, ignore_eos=True, detokenize=False)
    for seed in range(len(DRAWN))
]


@pytest.fixture(scope="module")
def rule_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(rule_models.make_target(tmp_path_factory.mktemp("rule") / "target"))


@pytest.fixture(scope="module")
def drawn(rule_target: str) -> list[list[int]]:
    with engine(rule_target, **never_wrong.SIZES) as llm:
        return first_tokens(generate(llm, DRAWN, DRAWN_PARAMS))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", pytest.param("medusa", marks=only_0_32)])
def test_drafter_of_the_rule_is_never_wrong(
    method: str, rule_target: str, drawn: list[list[int]], tmp_path: Path
) -> None:
    """Over blocks of all numbers, past its own limit, and through blocks that the prefix cache shares: were one slot
    wrong, a draft would be. Seeded texts are those without drafts."""
    head = str(rule_models.HEADS[method](tmp_path / "drafter"))
    model, config = (head, {}) if method == "mtp" else (rule_target, dict(model=head))
    config |= dict(method=method, num_speculative_tokens=5, **never_wrong.LIMIT)
    before = captured()
    with speculating(model, config, **never_wrong.SIZES) as llm:
        programs_are_the_manifest(llm, before)
        for _ in range(2):
            with never_waiting():
                never_wrong.ask(llm)
        with never_waiting():
            texts = first_tokens(generate(llm, DRAWN, DRAWN_PARAMS))
        if method != "mtp":  # which has a target of its own
            assert texts == drawn
        reads_once(llm)


@pytest.mark.parametrize("name", ["dflash mixed windows", "dflash2", "dspark windows"])
def test_drafts_of_blocks_are_those_of_the_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts_on_card(name, make_drafter(tmp_path / "drafter", KINDS[name], TARGET), monkeypatch)


def test_drafts_of_pard_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, config = test_parallel_drafting.make("pard", tmp_path)
    drafts, before = record_drafts(monkeypatch), captured()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    with speculating(target, config, **test_parallel_drafting.SIZES, max_num_seqs=4, async_scheduling=False) as llm:
        programs_are_the_manifest(llm, before)
        with never_waiting():
            generate(llm, test_parallel_drafting.TEXTS, params)
        reads_once(llm)
    reference = transformers_reference.Reference(config["model"])
    for text, tokens in list(drafts.items())[::4]:
        logits_KV = reference.logits_after(list(text), [MASK] * test_parallel_drafting.K)[: len(tokens)]
        best_K, chosen_K = logits_KV.max(1).values, logits_KV[range(len(tokens)), tokens]
        torch.testing.assert_close(chosen_K, best_K, atol=1e-3, rtol=1e-3)


def test_every_draft_of_chained_layers_is_right(tmp_path: Path) -> None:
    model = mtp_checkpoints.save("glm4-moe", tmp_path, 3, share=0.0)
    check_every_draft(model, dict(method="mtp", num_speculative_tokens=3), max_num_seqs=3, max_model_len=256)


def reads_once(llm: LLM) -> None:
    """Steps without an answer read nothing."""
    assert 0.9 < llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
@pytest.mark.parametrize(
    ("method", "size"), [("ngram_gpu", None), ("draft_model", 2), ("draft_model", 1), ("universal_draft", 2)]
)
def test_two_gpus_decide_alike(
    method: str,
    size: int | None,
    looping_llama: str,
    requests: list[Request],
    alone: Reference,
    request: pytest.FixtureRequest,
) -> None:
    """Tensor parallel over NCCL: collectives inside captured programs, and ranks that decide alike without telling.
    `size`: over how many the drafter is cut."""
    config = dict(ngram(3), method=method)
    if size is not None:
        drafter = looping_llama if method == "draft_model" else request.getfixturevalue("twin")
        config = dict(method=method, model=drafter, num_speculative_tokens=3, **MODES["coupled"])
        config["draft_tensor_parallel_size"] = size
    with speculating(looping_llama, config, **BOTH, async_scheduling=True, tensor_parallel_size=2) as llm:
        alone.check(requests, run_together(llm, requests))
        assert accepted(llm) > 50
        two_alike(llm)


@needs_two
@pytest.mark.parametrize("size", [1, 2])
def test_head_on_two_gpus_decides_alike(size: int, tmp_path: Path) -> None:
    """A whole one reads one rank's states, which are told within the captured program. What is said, the CPU shows."""
    model, head = (heads.with_four_heads(str(heads.TINY / name), tmp_path / name) for name in ("target", "eagle3"))
    config = dict(method="eagle3", model=head, num_speculative_tokens=3, draft_tensor_parallel_size=size)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with speculating(model, config, **BOTH, async_scheduling=True, tensor_parallel_size=2) as llm:
        generate(llm, heads.texts()[:8], params)
        assert accepted(llm) > 50
        two_alike(llm)


def two_alike(llm: LLM) -> None:
    ranks_agree(llm, 2)
    first, second = llm.collective_rpc("step_report")
    assert first["device"]["captured"] == second["device"]["captured"]
    for rank in (first, second):
        assert rank["graphs"]["after_warmup"] == rank["device"]["compiled_after_warmup"] == 0
