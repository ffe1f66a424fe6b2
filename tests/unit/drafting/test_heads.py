"""Check which layers a head shares with its target, and which tokens it predicts."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed import parallel_state

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.models import get_aux_layers, share_modules
from vllm_gaudi_spec.drafting.vocabulary import ReducedVocabulary
from vllm_gaudi_spec.upstream.models import PPMissingLayer


def test_head_with_reduced_vocabulary_drafts_only_its_tokens() -> None:
    output_ids = torch.tensor([2, 5, 6])
    translation = ReducedVocabulary(output_ids, 8)
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.full((1, 8), -torch.inf)
    expected[0, output_ids] = logits[0]
    assert torch.equal(translation.to_target(logits), expected)
    assert torch.equal(translation.to_drafter(output_ids), output_ids)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_reduced_vocabulary_outside_of_the_target_is_refused(wrong: int) -> None:
    with pytest.raises(UnsupportedConfigError, match="outside of the target's vocabulary"):
        ReducedVocabulary(torch.tensor([2, wrong, 6]), 8)


# --- what is the target's ---


def linear(*size: int) -> nn.Linear:
    return nn.Linear(*(size or (3, 4)), bias=False)


def model_of(**parts: nn.Module) -> nn.Module:
    """Return a model in which `inner_x` becomes `model.x`. Loading returns the names of weights."""
    made, made.model = nn.Module(), nn.Module()
    made.load_weights = lambda weights: [name for name, _ in weights]
    for name, part in parts.items():
        owner = made.model if name.startswith("inner_") else made
        setattr(owner, name.removeprefix("inner_"), part)
    return made


def test_head_without_matrices_shares_those_of_target() -> None:
    target = model_of(inner_embed_tokens=linear(), lm_head=linear())
    head = model_of(inner_embed_tokens=linear())
    head.has_own_embed_tokens = head.has_own_lm_head = False
    share_modules(target, head)
    assert head.model.embed_tokens is target.model.embed_tokens
    assert head.lm_head is target.lm_head
    assert head.load_weights(NEW) == ["d2t", "layers.0.norm.weight"]


NEW = [(name, 0) for name in ("d2t", "embed_tokens.weight", "layers.0.norm.weight", "lm_head.weight")]


@pytest.mark.parametrize("equal", [False, True])
def test_own_matrices_are_kept_unless_equal(equal: bool) -> None:
    target = model_of(inner_embed_tokens=linear(), lm_head=linear())
    head = model_of(inner_embed_tokens=linear(), lm_head=linear())
    head.has_own_embed_tokens = head.has_own_lm_head = True
    if equal:
        head.lm_head.weight = nn.Parameter(target.lm_head.weight.clone())
    share_modules(target, head)
    assert head.model.embed_tokens is not target.model.embed_tokens
    assert (head.lm_head is target.lm_head) == equal
    assert head.load_weights(NEW) == [name for name, _ in NEW if not equal or name != "lm_head.weight"]


@pytest.mark.parametrize(
    ("container", "has_own"),
    [(nn.ModuleList, False), (lambda layers: nn.ModuleDict({"9": layers[0]}), False), (nn.ModuleList, True)],
    ids=["list", "by number", "own"],
)
def test_mtp_layers_use_output_matrix_of_target_unless_they_have_one(container: Any, has_own: bool) -> None:
    """Step 3.5's layers have output matrices, and nothing else of the checkpoint does."""
    layer = nn.Module()
    layer.shared_head = model_of(head=linear())
    own, target = layer.shared_head.head, model_of(inner_embed_tokens=linear(), lm_head=linear())
    head = model_of(inner_layers=container([layer]), inner_embed_tokens=linear())
    if has_own:
        head.has_own_lm_head = True
    share_modules(target, head)
    assert layer.shared_head.head is (own if has_own else target.lm_head)


def test_embeddings_of_target_may_be_its_output_matrix() -> None:
    target, head = model_of(inner_embed_tokens=linear()), model_of(inner_embed_tokens=linear())
    share_modules(target, head)
    assert head.lm_head is target.model.embed_tokens
    with pytest.raises(UnsupportedConfigError, match="has no embeddings under a name that is supported"):
        share_modules(model_of(lm_head=linear()), head)


@pytest.mark.parametrize("has_own", [False, True])
def test_embeddings_of_the_first_stage_cannot_be_shared_on_the_last(has_own: bool) -> None:
    head = model_of(inner_embed_tokens=linear())
    head.has_own_embed_tokens = has_own
    with nullcontext() if has_own else pytest.raises(UnsupportedConfigError, match="use --pipeline-parallel-size 1"):
        share_modules(model_of(inner_embed_tokens=PPMissingLayer(), lm_head=linear()), head)


def test_whole_head_shares_modules_of_split_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared modules run in the target's group, within a head of one rank."""
    target_group, alone = SimpleNamespace(world_size=2), SimpleNamespace(world_size=1)
    asked: list[Any] = []

    class Embeddings(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            asked.append(parallel_state.get_tp_group())
            return tokens + 1

    target = model_of(inner_embed_tokens=Embeddings(), lm_head=linear())
    head = model_of(inner_embed_tokens=linear())
    monkeypatch.setattr(parallel_state, "_TP", alone)
    share_modules(target, head, target_group)
    assert head.model.embed_tokens(torch.tensor(3)) == 4
    assert asked == [target_group]
    assert parallel_state.get_tp_group() is alone
    assert head.lm_head is target.lm_head


def test_aux_layers_are_read_from_config() -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 5]}

    def read(**fields: Any) -> list[int] | None:
        described = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**fields)))
        layers = get_aux_layers(described)
        return None if layers is None else list(layers)

    assert read(eagle_aux_hidden_state_layer_ids=[2, 3], eagle_config=nested) == [2, 3]
    assert read(eagle_config=nested) == [1, 5]
    assert read(eagle_config=None) is None
    # The outputs of these layers, which the layers after them read.
    assert read(dflash_config=dict(target_layer_ids=[1, 5])) == [2, 6]
