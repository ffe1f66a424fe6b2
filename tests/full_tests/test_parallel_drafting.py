"""P-EAGLE and PARD: the logits are those of a reference, and drafts do not depend on the engine's schedule."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.full_tests import parallel_checkpoints
from tests.full_tests.engines import counter, engine, first_tokens, generate, preemptions
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import record_drafts, speculating
from tests.support.marks import slow
from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.drafting import parallel

SIZES: dict[str, Any] = dict(skip_tokenizer_init=True, max_model_len=128)
ALONE = SIZES | dict(max_num_seqs=1)
K = 4
TEXTS = random_prompts((5, 17, 31, 32, 33, 47, 48, 49, 64, 70, 12, 25), parallel_checkpoints.VOCAB - 1, seed=1)


def make(kind: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Write a target and a drafter. Return the target's folder and the speculative configuration."""
    target = parallel_checkpoints.make_target(folder / "target", "llama")
    if kind == "peagle":
        method, drafter = "eagle3", parallel_checkpoints.make_peagle(folder / "drafter", "llama", target)
    else:
        method, drafter = "draft_model", parallel_checkpoints.make_pard(folder / "drafter")
    for written in (target, drafter):  # vocabularies are compared
        parallel_checkpoints.save_tokenizer(written)
    return target, dict(method=method, model=drafter, parallel_drafting=True, num_speculative_tokens=K)


def renumber(folder: Path) -> dict[str, Any]:
    """Give the PARD model in `folder` other token ids, that of its mask too. Return what configures it."""
    shift, path = 11, folder / "config.json"
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(shift, 0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | dict(pard_token=(config["pard_token"] + shift) % parallel_checkpoints.VOCAB)))
    parallel_checkpoints.save_tokenizer(folder, shift=shift)
    return dict(method="universal_draft")


CROWDED = dict(kv_cache_memory_bytes=320 << 10, max_num_batched_tokens=64)
BY_LOAD = dict(num_speculative_tokens_per_batch_size=[[1, 3, K], [4, 64, 0]])


def params(**options: Any) -> list[SamplingParams]:
    """Every other request is greedy; each is longer than the one before."""
    chosen = dict(ignore_eos=True, detokenize=False, **options)
    return [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=20 + 4 * index, **chosen)
        for index in range(len(TEXTS))
    ]


@pytest.mark.parametrize(
    ("kind", "renumbered", "by_load"),
    [("pard", True, False), ("peagle", False, True), *slow(("pard", False, True), ("peagle", False, False))],
)
def test_drafts_do_not_depend_on_the_schedule(
    kind: str, renumbered: bool, by_load: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the ids of the drafter's tokens. Rows share steps, are preempted, stop to draft under load, or begin
    behind what was read without drafts; texts are those without drafts."""
    target, config = make(kind, tmp_path)
    drafts, off = record_drafts(monkeypatch), {REQUEST_OPTION: 0}
    with speculating(target, config, **ALONE, enable_prefix_caching=False, async_scheduling=False) as llm:
        expected = first_tokens(generate(llm, TEXTS, params(extra_args=off)))
        assert not drafts
        generate(llm, TEXTS[::2], params()[::2])
    alone = dict(drafts)
    drafts.clear()
    if renumbered:
        config |= renumber(Path(config["model"]))
    config |= dict(draft_sample_method="coupled", rejection_sample_method="strict") | (BY_LOAD if by_load else {})
    options = SIZES | dict(block_size=16, max_num_seqs=16, async_scheduling=False) | ({} if by_load else CROWDED)
    with speculating(target, config, **options) as llm:
        assert first_tokens(generate(llm, TEXTS, params())) == expected
        assert (preemptions(llm) > 0) == (not by_load)
        generate(llm, TEXTS[8:9], params(extra_args=off)[8:9])
        assert first_tokens(generate(llm, TEXTS[8:9], params()[8:9])) == expected[8:9]
        assert counter(llm, "vllm:prefix_cache_hits") > 0
    shared = alone.keys() & drafts.keys()
    assert len(shared) > 30
    for text in shared:
        length = min(len(alone[text]), len(drafts[text]))
        assert drafts[text][:length] == alone[text][:length]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """The drafter's logits, [drafts, its vocabulary], by length of a text that is served alone."""
    by_length: dict[int, torch.Tensor] = {}
    choose = parallel._choose_drafts

    def record(model: Any, translation: Any, request: Any, hidden_NH: torch.Tensor) -> Any:
        logits_KBU = model.logits(hidden_NH).unflatten(0, (request.num_drafts, -1))
        if request.max_drafts_B[0] == request.num_drafts:
            by_length[int(request.lengths_B[0])] = logits_KBU[:, 0].clone()
        return choose(model, translation, request, hidden_NH)

    monkeypatch.setattr(parallel, "_choose_drafts", record)
    return by_length


@pytest.mark.parametrize(
    ("family", "names_target"), [("llama", False), ("qwen3", True), *slow(("llama", True), ("qwen3", False))]
)
def test_peagle_computes_the_logits_of_the_library_speculators(
    family: str, names_target: bool, drafted: dict[int, torch.Tensor], tmp_path: Path
) -> None:
    """Served by itself, and as the head of a target."""
    target = parallel_checkpoints.make_target(tmp_path / "target", family)
    head = parallel_checkpoints.make_peagle(tmp_path / "head", family, target)
    expected = json.loads(parallel_checkpoints.EXPECTED.read_text())[family]
    text, prompt, k = expected["text"], parallel_checkpoints.PROMPT, parallel_checkpoints.NUM_DRAFTS
    options: dict[str, Any] = {}
    if names_target:
        named = dict(method="eagle3", model=head, parallel_drafting=True, num_speculative_tokens=k)
        options = dict(speculative_config=named)
    params = SamplingParams(temperature=0, max_tokens=k + 2, ignore_eos=True, detokenize=False)
    with engine(target if names_target else head, **options, **ALONE) as llm:
        for length in parallel_checkpoints.LENGTHS:
            (output,) = first_tokens(generate(llm, [text[: length - 1]], params))
            assert output[:k] == text[length - 1 :][:k]
    assert text[: len(prompt)] == prompt
    for length, logits in zip(parallel_checkpoints.LENGTHS, expected["logits"], strict=True):
        torch.testing.assert_close(drafted[length], torch.tensor(logits), atol=1e-4, rtol=0)


def test_pard_computes_the_logits_of_transformers(drafted: dict[int, torch.Tensor], tmp_path: Path) -> None:
    target, config = make("pard", tmp_path)
    k, prompt, reference = 6, parallel_checkpoints.PROMPT, Reference(config["model"])
    with engine(target, speculative_config=config | dict(num_speculative_tokens=k), **ALONE) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        (output,) = first_tokens(generate(llm, [prompt], params))
    assert len(drafted) > 5
    for length, logits in drafted.items():
        context = [*prompt, *output][:length]
        expected = reference.logits_after(context, [parallel_checkpoints.MASK] * k)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
