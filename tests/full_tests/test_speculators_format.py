"""Drafters in the format of the library speculators, as most on the Hugging Face Hub: each drafts as in its own format.
Such a checkpoint names its target, so it can also be served by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import LLM

from tests.full_tests import speculators_library
from tests.full_tests.block_drafters import KINDS, BlockReference, make_drafter, write_checkpoint
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.heads import MAX_LEN, TINY, greedy, head, target, texts
from tests.full_tests.speculation import Account, accounts, speculating
from tests.full_tests.speculators_library import TARGET, rewrite_drafter
from tests.full_tests.test_block_drafters import Recorder
from tests.full_tests.test_refusals import refusal
from tests.support.marks import quick_and_slow, slow

K = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny EAGLE-3 head, as speculators writes it."""
    folder, source = tmp_path_factory.mktemp("head"), TINY / "eagle3"
    layer = json.loads((source / "config.json").read_text())
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": layer.pop("eagle_aux_hidden_state_layer_ids"),
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
            "verifier": {"name_or_path": target("eagle3"), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }
    weights = load_file(source / "model.safetensors")
    named = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    assert set(named) != set(weights)
    return write_checkpoint(folder / "checkpoint", config, named)


def drafted(llm: LLM, num_tokens: int = 24) -> tuple[list[list[int]], list[Account]]:
    outputs = generate(llm, texts()[:6], greedy(num_tokens))
    return first_tokens(outputs), accounts(outputs)


def test_speculators_checkpoint_drafts_as_in_its_own_format(checkpoint: str) -> None:
    with speculating(target("eagle3"), head("eagle3", K), max_model_len=MAX_LEN) as llm:
        expected = drafted(llm)
    assert sum(sum(account.accepted) for account in expected[1]) > 20
    for model, config in ((target("eagle3"), dict(model=checkpoint)), (checkpoint, None)):
        options: dict[str, Any] = {} if config is None else dict(speculative_config=config)
        with engine(model, max_model_len=MAX_LEN, per_request_spec_decode_metrics="detailed", **options) as llm:
            assert drafted(llm) == expected, config


@pytest.mark.parametrize("name", quick_and_slow(["dflash mixed windows"], speculators_library.LENGTHS))
def test_block_drafter_of_the_library_drafts_as_its_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(tmp_path / "own", KINDS[name], TARGET)
    checkpoint = rewrite_drafter(drafter, tmp_path / "library", KINDS[name], K)
    reference, recorder = BlockReference(drafter, TARGET), Recorder(monkeypatch)
    for model, options in ((TARGET, dict(speculative_config=dict(model=checkpoint))), (checkpoint, {})):
        num_compared = 0
        with engine(model, max_model_len=MAX_LEN, **options) as llm:
            for prompt in texts()[-4:]:
                recorder.rounds.clear()
                output = first_tokens(generate(llm, [prompt], greedy(8)))[0]
                for length, drafts, logits in recorder.rounds:
                    wanted_KV = reference.block_logits([*prompt, *output][:length], drafts)
                    torch.testing.assert_close(torch.stack(logits), wanted_KV, atol=1e-4, rtol=1e-4)
                    assert len(drafts) == K
                    num_compared += 1
        assert num_compared > 8, options


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine(TARGET, max_model_len=MAX_LEN) as llm:
        return first_tokens(generate(llm, texts()[:6], greedy(96)))


@pytest.mark.parametrize(("name", "least"), [("dflash", 1.3), pytest.param("peagle", 1.1, marks=pytest.mark.slow)])
def test_trained_drafter_of_the_library_is_accepted(name: str, least: float, expected: list[list[int]]) -> None:
    with speculating(TARGET, dict(model=str(TINY / name)), max_model_len=MAX_LEN) as llm:
        tokens, every = drafted(llm, 96)
    assert tokens == expected
    accepted = [number for account in every for number in account.accepted]
    assert max(account.drafted[0] for account in every) == 8
    assert sum(accepted) > least * len(accepted)
    assert max(accepted) > 3


@pytest.mark.parametrize(
    ("method", "words"),
    [("mtp", "and use method mtp"), *slow(("xpress", "use a drafter of method eagle3, peagle, dflash"))],
)
def test_other_methods_of_the_library_are_refused(method: str, words: str, checkpoint: str, tmp_path: Path) -> None:
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(speculators_model_type=method)))
    drafter = str(tmp_path)
    for model, options in (
        (drafter, {}),
        (TARGET, dict(speculative_config=dict(model=drafter))),
        (TARGET, dict(speculative_config=dict(model=drafter, method="eagle3", num_speculative_tokens=2))),
    ):
        message = refusal(model, **options)
        assert f"of method {method}, which vLLM does not read" in message
        assert words in message


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dflash", dict(sample_from_anchor=True), "from the newest token's place (sample_from_anchor)"),
        ("dspark", dict(markov_head_type="gated"), "a Markov head of type gated, and only vanilla is supported"),
    ],
)
def test_other_forms_of_block_drafters_are_refused(
    name: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "own", KINDS[name], TARGET)
    checkpoint = Path(rewrite_drafter(drafter, tmp_path / "library", KINDS[name], K))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | options))
    assert words in refusal(str(checkpoint))


@pytest.mark.parametrize("name", speculators_library.LENGTHS)
def test_reference_of_block_drafters_computes_the_logits_of_the_library(name: str, tmp_path: Path) -> None:
    """`BlockReference`, which the engine's blocks are compared with, against what release 0.9.0 computed."""
    drafter = make_drafter(tmp_path / "drafter", KINDS[name], target("dflash"))
    reference = BlockReference(drafter, target("dflash"))
    rounds = [each for each in json.loads(speculators_library.RECORDED.read_text())["rounds"] if each["kind"] == name]
    assert [each["length"] for each in rounds] == [*speculators_library.LENGTHS[name]]
    for each in rounds:
        logits_KV = reference.block_logits(*speculators_library.split_text(each["length"]))
        ids_KN, recorded_KN = torch.tensor(each["ids"]), torch.tensor(each["logits"])
        torch.testing.assert_close(logits_KV.gather(1, ids_KN), recorded_KN, atol=1e-4, rtol=1e-5)
        if KINDS[name].family != "dflash2":
            assert torch.equal(logits_KV.argmax(1), ids_KN[:, 0])
