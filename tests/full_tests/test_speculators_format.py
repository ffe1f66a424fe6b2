"""Drafters in the format of the library speculators, as most on the Hugging Face Hub: each drafts as in its own format.
Such a checkpoint names its target, so it can also be served by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import LLM

from tests.full_tests.block_drafters import KINDS, BlockReference, make_drafter, write_checkpoint
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.heads import MAX_LEN, TINY, greedy, head, target, text, texts
from tests.full_tests.published_drafters import PUBLISHED
from tests.full_tests.speculation import Account, accounts, speculating
from tests.full_tests.test_refusals import refusal
from tests.support.marks import slow

K = 3
TARGET = target("dflash")


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
        assert f"for method {method}, which vLLM does not support" in message
        assert words in message


DFLASH = json.loads((TINY / "dflash" / "config.json").read_text())
DSPARK = PUBLISHED["GLM-5.3-speculator.dspark"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DFLASH | dict(sample_from_anchor=True), "from the newest token's position (sample_from_anchor)"),
        (DSPARK.reduce() | dict(markov_head_type="gated"), "of type gated, but only vanilla is supported"),
    ],
    ids=["dflash", "dspark"],
)
def test_other_forms_of_block_drafters_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words in refusal(TARGET, speculative_config=dict(model=str(tmp_path)))


RECORDED = json.loads(Path(__file__).with_name("speculators_logits.json").read_text())["rounds"]
"""Results of release 0.9.0 of the library, recorded by tests/full_tests/speculators_library.py at commit 6e63f5e8.

There a window is counted from the anchor for the whole block, in vLLM and here from each query, so texts of those kinds
are shorter than the window.
"""


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each['kind']} {each['length']}")
def test_reference_of_block_drafters_computes_the_logits_of_the_library(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    """`BlockReference`, which the engine's blocks are compared with."""
    kind = KINDS[recorded["kind"]]
    reference = BlockReference(make_drafter(tmp_path / "drafter", kind, TARGET), TARGET)
    ids_KN, recorded_KN = torch.tensor(recorded["ids"]), torch.tensor(recorded["logits"])
    tokens = text(recorded["length"] + len(ids_KN))
    logits_KV = reference.block_logits(tokens[: recorded["length"]], tokens[recorded["length"] :])
    torch.testing.assert_close(logits_KV.gather(1, ids_KN), recorded_KN, atol=1e-4, rtol=1e-5)
    if kind.family != "dflash2":
        assert torch.equal(logits_KV.argmax(1), ids_KN[:, 0])
