"""Parallel drafters: some are never wrong as long as they are fed what they should be (rule_models.py), others compute
the logits of a reference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from tests.full_tests import parallel_checkpoints, rule_models
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.reference import Reference
from tests.full_tests.test_heads_rule import (
    BARE,
    SCHEDULES,
    check_every_draft,
    check_resumed_drafting,
    check_sampled_texts,
)
from vllm_gaudi_spec.drafting import parallel

COUPLED = dict(draft_sample_method="coupled", rejection_sample_method="strict")
METHODS = {"peagle": ("eagle3", rule_models.make_peagle), "pard": ("draft_model", rule_models.make_pard)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, dict[str, Any]]]:
    """The target and the configuration that names the drafter."""
    folder = tmp_path_factory.mktemp("rule")
    rule_models.make_target(folder / "target")
    made: dict[str, dict[str, Any]] = {}
    for kind, (method, make) in METHODS.items():
        made[kind] = dict(method=method, model=str(make(folder / kind)), parallel_drafting=True)
    for name in ("target", "pard"):  # vocabularies are compared
        parallel_checkpoints.save_tokenizer(folder / name, rule_models.VOCAB)
    return lambda kind: (str(folder / "target"), made[kind])


QUICK = [("peagle", 4, "chunked, cached, preempted"), ("pard", 4, "chunked, cached, preempted")]
ALL = [(kind, k, schedule) for kind in METHODS for k in (1, 4, 8) for schedule in SCHEDULES]


@pytest.mark.parametrize(
    ("kind", "k", "schedule"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)]
)
def test_every_draft_is_right(
    kind: str, k: int, schedule: str, pair: Callable[[str], tuple[str, dict[str, Any]]]
) -> None:
    # These drafters have more layers than the heads that the schedules' KV was chosen for.
    kv = dict(kv_cache_memory_bytes=9 << 18) if "preempted" in schedule else {}
    check_every_draft(*pair(kind), k, schedule, **kv)


@pytest.mark.parametrize("options", [{}, pytest.param(COUPLED, marks=pytest.mark.slow)], ids=str)
def test_drafts_of_another_vocabulary_are_right(
    options: dict[str, Any], pair: Callable[[str], tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """A PARD model whose ids, that of its mask token too, are others than the target's."""
    model, named = pair("pard")
    config = named | options | dict(method="universal_draft", model=renumber(Path(named["model"]), tmp_path))
    if options:
        check_sampled_texts(model, config, foresees=False)
    else:
        check_every_draft(model, config, 4, "plain")


def renumber(source: Path, folder: Path) -> str:
    """Write the PARD model in `source` with other token ids."""
    shift, vocab = 11, rule_models.VOCAB
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name].roll(shift, 0)
    config = json.loads((source / "config.json").read_text())
    config["pard_token"] = (config["pard_token"] + shift) % vocab
    parallel_checkpoints.save_tokenizer(folder, vocab, shift=shift)
    return str(rule_models.save(folder, weights, config))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("peagle", COUPLED),
        pytest.param("pard", {}, marks=pytest.mark.slow),
        pytest.param("peagle", {}, marks=pytest.mark.slow),
        pytest.param("pard", COUPLED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sampled_texts_are_those_of_no_speculation(
    kind: str, options: dict[str, Any], pair: Callable[[str], tuple[str, dict[str, Any]]]
) -> None:
    model, config = pair(kind)
    # A drawn draft breaks the rule where the target does, but the ones after it do not know.
    check_sampled_texts(model, config | options, foresees=not options)


@pytest.mark.parametrize("kind", ["peagle", pytest.param("pard", marks=pytest.mark.slow)])
def test_row_drafts_again_when_the_load_falls(kind: str, pair: Callable[[str], tuple[str, dict[str, Any]]]) -> None:
    check_resumed_drafting(*pair(kind))


# --- logits ---


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


ALONE = BARE | dict(max_num_seqs=1, max_model_len=64)


@pytest.mark.parametrize(
    ("family", "names_target"),
    [
        ("llama", False),
        ("qwen3", True),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
    ],
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
    target = parallel_checkpoints.make_target(tmp_path / "target", "llama")
    drafter = parallel_checkpoints.make_pard(tmp_path / "drafter")
    for folder in (target, drafter):
        parallel_checkpoints.save_tokenizer(folder)
    k, prompt, reference = 6, parallel_checkpoints.PROMPT, Reference(drafter)
    named = dict(method="draft_model", model=drafter, parallel_drafting=True, num_speculative_tokens=k)
    with engine(target, speculative_config=named, **ALONE) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        (output,) = first_tokens(generate(llm, [prompt], params))
    assert len(drafted) > 5
    for length, logits in drafted.items():
        context = [*prompt, *output][:length]
        expected = reference.logits_after(context, [parallel_checkpoints.MASK] * k)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
