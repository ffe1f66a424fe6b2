"""Drafts of the universal proposer, a subclass of vllm-ascend's real one, with a drafter of another vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from vllm_ascend import spec_decode
from vllm_ascend.spec_decode.draft_proposer import AscendDraftModelProposer

from tests.integrations import models
from tests.integrations.scene import CPU, K, Scene, configuration, runner, start
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.integrations.vllm_ascend import patches
from vllm_gaudi_spec.integrations.vllm_ascend.proposer import AscendUniversalDraftProposer
from vllm_gaudi_spec.patching import wrap
from vllm_gaudi_spec.proposers.universal.pairs import Pair

TEXTS = [
    "The quick brown fox costs seconds",
    "whatever the dog says; 0123",
    "bucket \u00e9\u20ac and over the lazy shape, one",
]


@pytest.fixture(scope="module", autouse=True)
def taught() -> None:
    """As `test_a_worker_teaches_what_makes_proposers` shows."""
    wrap(spec_decode, "get_spec_decode_method", patches._get_spec_decode_method)


@pytest.fixture(scope="module")
def loaded(folders: dict[str, str]) -> Scene:
    return Scene.load(configuration(folders["target"], folders["drafter"]))


@pytest.fixture
def scene(loaded: Scene) -> Scene:
    loaded.forget()
    return loaded


@pytest.fixture(scope="module")
def pair(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.load(configuration(folders["target"], folders["drafter"]), tmp_path_factory.mktemp("maps"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [models.tokenizer("target")(text).input_ids for text in TEXTS]


class Plain:
    """The drafter by itself: a greedy loop over its own tokens, those of both vocabularies alone, without a cache."""

    def __init__(self, folder: str, pair: Pair) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.map = pair.map
        (self.stand_in,) = models.tokenizer("drafter")(" ").input_ids

    def read(self, tokens: list[int]) -> list[int]:
        return [int(i) if i >= 0 else self.stand_in for i in self.map.target_to_draft[tokens]]

    @torch.inference_mode()
    def best(self, ids: list[int], confined: bool) -> int:
        logits = self.model(torch.tensor([ids])).logits[0, -1]
        return int((logits.where(torch.tensor(self.map.draftable), -torch.inf) if confined else logits).argmax())

    def draft(self, tokens: list[int], confined: bool = True) -> list[int]:
        """Ids of its own."""
        ids, made = self.read(tokens), []
        for _ in range(K):
            made.append(self.best(ids + made, confined))
        return made

    def drafts(self, tokens: list[int]) -> list[int]:
        return self.map.draft_to_target[self.draft(tokens)].tolist()


@pytest.fixture(scope="module")
def plain(folders: dict[str, str], pair: Pair) -> Plain:
    return Plain(folders["drafter"], pair)


def test_the_vocabularies_are_worth_a_test(pair: Pair, plain: Plain, prompts: list[list[int]]) -> None:
    """Ids differ, both sides have tokens of their own, and the drafter alone would leave what they share."""
    matched = np.flatnonzero(pair.map.target_to_draft >= 0)
    assert 256 < len(matched) < len(pair.map.target_to_draft) < len(pair.map.draft_to_target)
    assert (pair.map.target_to_draft[matched] != matched).mean() > 0.9
    assert any(pair.map.target_to_draft[token] < 0 for prompt in prompts for token in prompt)
    assert any(not pair.map.draftable[token] for prompt in prompts for token in plain.draft(prompt, confined=False))


def test_it_is_upstreams_proposer_wholly_constructed(scene: Scene) -> None:
    assert isinstance(scene.proposer, AscendUniversalDraftProposer)
    assert isinstance(scene.proposer, AscendDraftModelProposer)
    assert "__init__" in vars(AscendDraftModelProposer)
    for made_by_a_constructor in ("attn_mask_builder", "slot_mapping_group", "input_ids", "decode_threshold"):
        assert hasattr(scene.proposer, made_by_a_constructor)
    assert scene.proposer._runnable == scene.proposer._run_merged_draft


def test_prompts_are_drafted_for_as_by_the_drafter_alone(scene: Scene, plain: Plain, prompts: list[list[int]]) -> None:
    found = scene.draft([prompt[:-1] for prompt in prompts], [0] * len(prompts), [prompt[-1] for prompt in prompts])
    assert found == [plain.drafts(prompt) for prompt in prompts]


def test_steps_behind_accepted_drafts_go_on(scene: Scene, plain: Plain, prompts: list[list[int]]) -> None:
    """All drafts accepted, then a token of the target's that the drafter does not have, and one that it has."""
    drafts = scene.draft([prompt[:-1] for prompt in prompts], [0] * len(prompts), [prompt[-1] for prompt in prompts])
    starts = [len(prompt) - 1 for prompt in prompts]
    following = [int(np.flatnonzero(plain.map.target_to_draft < 0)[0]), 40, 41]
    tokens = [[prompt[-1], *draft] for prompt, draft in zip(prompts, drafts, strict=True)]
    found = scene.draft(tokens, starts, following, accepted=[K] * len(prompts))
    whole = [[*p, *draft, token] for p, draft, token in zip(prompts, drafts, following, strict=True)]
    assert found == [plain.drafts(tokens) for tokens in whole]


def test_a_step_behind_rejected_drafts_reads_only_what_was_accepted(
    scene: Scene, plain: Plain, prompts: list[list[int]]
) -> None:
    """Its first draft. For those behind it vllm-ascend counts rejected tokens as read, with any drafter: should that
    end, all drafts can be compared here, and docs/ascend_vllm_ascend.md is to be corrected."""
    drafts = scene.draft([prompt[:-1] for prompt in prompts], [0] * len(prompts), [prompt[-1] for prompt in prompts])
    starts, accepted, following = [len(prompt) - 1 for prompt in prompts], [0, 2, 4], [50, 51, 52]
    tokens = [[prompt[-1], *draft] for prompt, draft in zip(prompts, drafts, strict=True)]
    found = scene.draft(tokens, starts, following, accepted)
    for row, prompt in enumerate(prompts):
        whole = [*prompt, *drafts[row][: accepted[row]], following[row]]
        assert found[row][0] == plain.drafts(whole)[0]
        assert (found[row] == plain.drafts(whole)) == (accepted[row] == K)


def test_the_drafter_reads_and_writes_its_own_tokens(
    scene: Scene, plain: Plain, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []
    model = scene.proposer.model
    real = type(model).forward

    def forward(self: Any, input_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
        read.append(input_ids.tolist())
        return real(self, input_ids, *args, **named)

    monkeypatch.setattr(type(model), "forward", forward)
    prompt = prompts[0]
    (found,) = scene.draft([prompt[:-1]], [0], [prompt[-1]])
    first, *others = read
    assert first == plain.read(prompt)
    assert [ids for (ids,) in others] == plain.map.target_to_draft[found[:-1]].tolist()


def test_logits_are_confined_to_tokens_of_both(scene: Scene, pair: Pair) -> None:
    states = torch.randn(64, scene.proposer.model.config.hidden_size)
    logits = scene.proposer.model.compute_logits(states)
    assert logits.shape[1] == len(pair.map.draftable)
    assert (logits.isfinite() == torch.tensor(pair.map.draftable)).all()


def test_ids_that_are_no_tokens_are_read_as_some(scene: Scene, pair: Pair) -> None:
    size = len(pair.map.target_to_draft)
    read = scene.proposer._to_drafter(torch.tensor([-1, size, size + 9], dtype=torch.int32))
    assert read.dtype == torch.int32
    assert ((read >= 0) & (read < len(pair.map.draftable))).all()


def test_a_profile_run_passes(scene: Scene) -> None:
    scene.proposer.dummy_run(num_tokens=2 * (K + 1), is_profile=True)


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that drafts for itself, each row of its matrices a token."""
    return models.save("drafter", tmp_path_factory.mktemp("same"), padding=0)


def test_with_one_vocabulary_it_drafts_as_upstreams_own_method(same: str) -> None:
    """Rejections included, of which upstream keeps an account of its own."""
    prompts = [models.tokenizer("drafter")(text).input_ids for text in TEXTS]
    found = []
    for method in ("draft_model", "universal_draft"):
        scene = Scene.load(configuration(same, same, method))
        scene.forget(0.0)  # they read what nobody wrote behind rejected drafts: the same, then
        assert isinstance(scene.proposer, AscendUniversalDraftProposer) == (method == "universal_draft")
        starts = [0] * len(prompts)
        drafts = [scene.draft([prompt[:-1] for prompt in prompts], starts, [prompt[-1] for prompt in prompts])]
        for accepted in ([4, 2, 0], [1, 3, 4]):
            tokens = [[prompt[-1], *draft] for prompt, draft in zip(prompts, drafts[-1], strict=True)]
            starts = [len(prompt) - 1 for prompt in prompts]
            drafts.append(scene.draft(tokens, starts, [60, 61, 62], accepted))
        found.append(drafts)
    assert found[0] == found[1]


def test_sizes_are_no_matter_and_upstream_still_makes_them_one(folders: dict[str, str]) -> None:
    """Fails when upstream no longer compares sizes: then the override can go."""
    config = configuration(folders["target"], folders["drafter"])
    sizes = [model.get_vocab_size() for model in (config.model_config, config.speculative_config.draft_model_config)]
    assert sizes[0] != sizes[1]
    setattr(config.speculative_config, patches.IS_UNIVERSAL, False)
    start(config)
    with pytest.raises(ValueError, match="same vocabulary size"):
        AscendDraftModelProposer(config, CPU, runner())


def test_the_drafter_has_to_be_as_parallel_as_the_target(folders: dict[str, str]) -> None:
    config = configuration(folders["target"], folders["drafter"])
    config.speculative_config.draft_parallel_config.tensor_parallel_size = 2
    start(config)
    with pytest.raises(ValueError, match="'draft_tensor_parallel_size' and 'tensor_parallel_size' must be the same"):
        spec_decode.get_spec_decode_method("draft_model", config, CPU, runner())


def test_options_that_it_does_not_heed_are_refused(folders: dict[str, str]) -> None:
    for option, named in (
        ({"enable_reduce_sample": True}, "turn enable_reduce_sample off"),
        ({"gaudi_spec": {"universal_match": "slem"}}, "additional_config.gaudi_spec"),
    ):
        config = configuration(folders["target"], folders["drafter"], additional_config=option)
        start(config)
        with pytest.raises(UnsupportedConfigError, match=named):
            spec_decode.get_spec_decode_method("draft_model", config, CPU, runner())


def test_no_token_in_common_is_an_error(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.proposers.universal import vocab_map

    real = vocab_map.read_vocabulary

    def without_text(model: Any) -> Any:
        found = real(model)
        object.__setattr__(found, "id_by_bytes", {})
        return found

    monkeypatch.setattr(vocab_map, "read_vocabulary", without_text)
    monkeypatch.setattr("vllm_gaudi_spec.integrations.vllm_ascend.proposer.cache_folder", lambda: Path("/nonexistent"))
    with pytest.raises(UnsupportedConfigError, match="No token of the drafter"):
        Scene.load(configuration(folders["target"], folders["drafter"]))
