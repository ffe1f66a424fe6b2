"""Drafts of the universal proposer, a subclass of vllm-ascend's real one, with a drafter of another vocabulary."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_ascend import spec_decode
from vllm_ascend.spec_decode.draft_proposer import AscendDraftModelProposer

from tests.full_tests import tiny_models
from tests.integrations.scene import FALSE, LIMITS, NPU, K, Scene, configuration, made, runner, start
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal.pairs import Pair
from vllm_gaudi_spec.integrations.vllm_ascend import patches
from vllm_gaudi_spec.integrations.vllm_ascend.proposer import AscendUniversalDraftProposer
from vllm_gaudi_spec.upstream.patching import wrap

DOCS = Path(__file__).parents[2] / "docs" / "how_to" / "migrate.md"
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
    start(loaded.config)  # others were started since
    loaded.forget()
    return loaded


@pytest.fixture(scope="module")
def pair(folders: dict[str, str]) -> Pair:
    return Pair.load(configuration(folders["target"], folders["drafter"]))


@pytest.fixture(scope="module")
def prompts(folders: dict[str, str]) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(folders["target"])(TEXTS).input_ids


class Plain:
    """The drafter by itself: a greedy loop over its own tokens, those of both vocabularies alone, without a cache."""

    def __init__(self, folder: str, pair: Pair) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.map = pair.map
        (self.stand_in,) = AutoTokenizer.from_pretrained(folder)(" ").input_ids

    def read(self, tokens: list[int]) -> list[int]:
        return [int(i) if i >= 0 else self.stand_in for i in self.map.target_to_draft[tokens]]

    @torch.inference_mode()
    def best(self, ids: list[int], confined: bool) -> int:
        logits = self.model(torch.tensor([ids])).logits[0, -1]
        return int((logits.where(torch.tensor(self.map.draftable), -torch.inf) if confined else logits).argmax())

    def draft(self, tokens: list[int], confined: bool = True) -> list[int]:
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


def construct(config: VllmConfig) -> Any:
    start(config)
    return spec_decode.get_spec_decode_method("draft_model", config, NPU, runner(config))


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
    end, all drafts can be compared here, and docs/how_to/migrate.md is to be corrected."""
    drafts = scene.draft([prompt[:-1] for prompt in prompts], [0] * len(prompts), [prompt[-1] for prompt in prompts])
    starts, accepted, following = [len(prompt) - 1 for prompt in prompts], [0, 2, 4], [50, 51, 52]
    tokens = [[prompt[-1], *draft] for prompt, draft in zip(prompts, drafts, strict=True)]
    found = scene.draft(tokens, starts, following, accepted)
    for row, prompt in enumerate(prompts):
        whole = [*prompt, *drafts[row][: accepted[row]], following[row]]
        assert found[row][0] == plain.drafts(whole)[0]
        assert (found[row] == plain.drafts(whole)) == (accepted[row] == K)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_profile_run_goes_through_all_steps(scene: Scene, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """With graphs: as far as the proposer decides, the drafter itself was made without."""
    seen: list[tuple[int, CUDAGraphMode]] = []
    real = type(scene.proposer.model).forward

    def forward(self: Any, input_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
        seen.append((len(input_ids), get_forward_context().cudagraph_runtime_mode))
        return real(self, input_ids, *args, **named)

    monkeypatch.setattr(type(scene.proposer.model), "forward", forward)
    monkeypatch.setattr(scene.proposer, "use_cuda_graph", graphs)
    mode, size = CUDAGraphMode.PIECEWISE, 2 * (K + 1)
    scene.proposer.dummy_run(num_tokens=size, is_profile=True, aclgraph_runtime_mode=mode)
    assert [length for length, _ in seen] == [size] + (K - 1) * [size if graphs else 2]
    assert {found for _, found in seen} == {mode if graphs else CUDAGraphMode.NONE}


GRAPHS_FOR_THE_TARGET = {"speculative": {"enforce_eager": True}}
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
NO_GRAPHS = {"enforce_eager": True}


@pytest.mark.parametrize("mode", [None, "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_full_graphs_are_refused_with_the_ways_out(folders: dict[str, str], mode: str | None) -> None:
    """Without a mode: what vLLM takes by itself."""
    asked = {"compilation_config": {"cudagraph_mode": mode}} if mode else {}
    config = configuration(folders["target"], folders["drafter"], enforce_eager=False, **asked)
    with pytest.raises(UnsupportedConfigError, match="cannot run draft models in full graphs") as refused:
        construct(config)
    for way, option in ((PIECEWISE, "compilation_config"), (GRAPHS_FOR_THE_TARGET, "speculative")):
        assert json.dumps(way[option]).strip("{}") in str(refused.value)


@pytest.mark.parametrize(("way", "graphs"), [(PIECEWISE, True), (GRAPHS_FOR_THE_TARGET, False), (NO_GRAPHS, False)])
def test_the_ways_out_are_taken(folders: dict[str, str], way: dict[str, Any], graphs: bool) -> None:
    config = configuration(folders["target"], folders["drafter"], **{"enforce_eager": False, **way})
    proposer = construct(config)
    assert proposer.use_cuda_graph == graphs
    assert config.compilation_config.cudagraph_mode.has_full_cudagraphs() == (way is GRAPHS_FOR_THE_TARGET)


def test_upstream_still_makes_no_graph_of_draft_models(folders: dict[str, str]) -> None:
    """Fails when it does: then the refusal of full graphs can go."""
    config = configuration(folders["target"], folders["target"], "draft_model", enforce_eager=False)
    proposer = construct(config)
    proposer._maybe_share_lm_head(None)
    assert proposer.use_cuda_graph
    assert not hasattr(proposer, "update_stream")
    assert proposer._runnable == proposer._run_merged_draft


def test_the_commands_of_the_docs_start(folders: dict[str, str]) -> None:
    text = DOCS.read_text()
    commands = [line for line in text.replace("\\\n", "").splitlines() if line.startswith("vllm serve ")]
    assert commands
    for command in commands:
        words = command.replace("TARGET", folders["target"]).replace("DRAFTER", folders["drafter"])
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        _, _, target, *options = shlex.split(words)
        arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", target, *options]))
        for name, value in LIMITS.items():
            setattr(arguments, name, value)
        assert construct(made(arguments)).num_speculative_tokens == K


def test_rows_without_a_sampled_token_go_on_from_what_is_known(
    scene: Scene, plain: Plain, prompts: list[list[int]]
) -> None:
    """Of the second row there is more to read, so that what was sampled there does not count."""
    following = [prompt[-1] for prompt in prompts]
    assert following[1] != FALSE
    found = scene.draft([prompt[:-1] for prompt in prompts], [0] * len(prompts), following, discarded=[1])
    assert found == [plain.drafts(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def overlapping(folders: dict[str, str]) -> Scene:
    return Scene.load(configuration(folders["target"], folders["drafter"], async_scheduling=True))


def test_with_overlapping_steps_drafts_are_the_same(overlapping: Scene, plain: Plain, prompts: list[list[int]]) -> None:
    """Of a row whose last token the host does not know yet nothing is said but that its drafts are tokens; the others
    are drafted for as ever, then behind accepted and rejected drafts."""
    scene, starts = overlapping, [0] * len(prompts)
    start(scene.config)
    scene.forget()
    following = [prompts[0][-1], -1, prompts[2][-1]]
    found = scene.draft([prompt[:-1] for prompt in prompts], starts, following, discarded=[1])
    assert [found[0], found[2]] == [plain.drafts(prompts[0]), plain.drafts(prompts[2])]
    assert all(0 <= token < len(plain.map.target_to_draft) for token in found[1])

    scene.forget()
    drafts = scene.draft([prompt[:-1] for prompt in prompts], starts, [prompt[-1] for prompt in prompts])
    starts, accepted, following = [len(prompt) - 1 for prompt in prompts], [4, 1, 4], [50, 51, 52]
    tokens = [[prompt[-1], *draft] for prompt, draft in zip(prompts, drafts, strict=True)]
    found = scene.draft(tokens, starts, following, accepted)
    for row, prompt in enumerate(prompts):
        expected = plain.drafts([*prompt, *drafts[row][: accepted[row]], following[row]])
        assert found[row][0] == expected[0]
        assert found[row] == expected or accepted[row] < K


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that drafts for itself, each row of its matrices a token."""
    return tiny_models.save(tiny_models.llama, tmp_path_factory.mktemp("same"))


def test_with_one_vocabulary_it_drafts_as_upstreams_own_method(same: str) -> None:
    """Rejections included, of which upstream keeps an account of its own."""
    prompts = AutoTokenizer.from_pretrained(same)(TEXTS).input_ids
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
        AscendDraftModelProposer(config, NPU, runner(config))


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"additional_config": {"enable_reduce_sample": True}}, "turn enable_reduce_sample off"),
        ({"additional_config": {"gaudi_spec": {"universal_match": "slem"}}}, "additional_config.gaudi_spec"),
        ({"enable_sleep_mode": True}, "leave --enable-sleep-mode out"),
    ],
)
def test_options_that_it_does_not_heed_are_refused(folders: dict[str, str], option: dict[str, Any], named: str) -> None:
    config = configuration(folders["target"], folders["drafter"], **option)
    with pytest.raises(UnsupportedConfigError, match=named):
        construct(config)


def test_no_token_in_common_is_an_error(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.drafting.universal import pairs

    real = pairs.read_vocabulary

    def without_text(model: Any) -> Any:
        found = real(model)
        object.__setattr__(found, "id_by_bytes", {})
        return found

    monkeypatch.setattr(pairs, "read_vocabulary", without_text)
    with pytest.raises(UnsupportedConfigError, match="No token of the drafter"):
        Scene.load(configuration(folders["target"], folders["drafter"]))
