"""A head in the format of the library speculators, as most heads on the Hugging Face Hub: it drafts as the same head in
its own format does. Such a checkpoint names its target, so it can also be served by itself."""

import json
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import LLM

from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.heads import MAX_LEN, TINY, greedy, head, target, texts
from tests.full_tests.speculation import Account, accounts, speculating

K = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny EAGLE-3 head, as speculators writes it."""
    # vLLM takes the method from the name, as it stands in those on the Hub.
    folder, source = tmp_path_factory.mktemp("Tiny-speculator.eagle3"), TINY / "eagle3"
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
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    named = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    assert set(named) != set(weights)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def drafted(llm: LLM) -> tuple[list[list[int]], list[Account]]:
    outputs = generate(llm, texts()[:6], greedy(24))
    return first_tokens(outputs), accounts(outputs)


def test_speculators_checkpoint_drafts_as_in_its_own_format(checkpoint: str) -> None:
    with speculating(target("eagle3"), head("eagle3", K), max_model_len=MAX_LEN) as llm:
        expected = drafted(llm)
    assert sum(sum(account.accepted) for account in expected[1]) > 20
    for model, config in (
        (target("eagle3"), dict(model=checkpoint, num_speculative_tokens=K)),
        (checkpoint, None),
    ):
        options: dict[str, Any] = {} if config is None else dict(speculative_config=config)
        with engine(model, max_model_len=MAX_LEN, per_request_spec_decode_metrics="detailed", **options) as llm:
            assert drafted(llm) == expected, config
