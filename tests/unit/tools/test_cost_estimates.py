"""Estimates of a Gaudi's steps follow from the sizes of a model's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_gaudi_spec.emulator.cost import CARDS, EFFICIENCY, HOST_WAIT_SECONDS, LAUNCH_SECONDS
from vllm_gaudi_spec.tools.tune.estimates import Outline, estimate, tensor_sizes

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 32, 2, 4, 2


def model(folder: Path, *, tied: bool = True, borrows: bool = False) -> Path:
    """With one matrix of 1000 weights beside embeddings."""
    folder.mkdir()
    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.layers.0.weight": torch.zeros(10, 100)}
    if not borrows:
        weights["model.embed_tokens.weight"] = torch.zeros(VOCABULARY, HIDDEN)
    if not tied:
        weights["lm_head.weight"] = torch.zeros(VOCABULARY, HIDDEN)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_outline(tmp_path: Path) -> None:
    tied, untied = Outline.of(model(tmp_path / "tied")), Outline.of(model(tmp_path / "untied", tied=False))
    # An embedding table is read whole only where it is the output matrix as well.
    assert tied.weights == untied.weights == 1000 + VOCABULARY * HIDDEN
    assert tied.kv_values == 2 * KV_HEADS * HIDDEN // HEADS


def test_amounts_of_a_step(tmp_path: Path) -> None:
    outline = Outline.of(model(tmp_path / "model"))
    tally = outline.tally(batch=3, queries=5, context=100)
    kv = 3 * 100 * LAYERS * (2 * KV_HEADS * 8) * 2
    assert tally.kv_bytes_read == kv
    assert tally.bytes_moved == 2 * outline.weights + kv + 2 * 15 * VOCABULARY * 4
    assert tally.flops == 2 * 15 * outline.weights + 4 * 15 * 100 * LAYERS * HEADS * 8


@pytest.mark.parametrize("generation", ["gaudi2", "gaudi3"])
def test_a_step_is_bounded_by_its_card(tmp_path: Path, generation: str) -> None:
    folder = model(tmp_path / "model")
    cost = estimate(folder, "ngram", None, num_drafts=3, batch=2, context=50, generation=generation)
    fixed = 3 * LAUNCH_SECONDS + HOST_WAIT_SECONDS
    card = CARDS[generation]
    for seconds, queries in ((cost.plain_s, 1), (cost.verify_s, 4)):
        moved = Outline.of(folder).tally(2, queries, 50).bytes_moved
        assert seconds == pytest.approx(fixed + moved / (card.memory_bandwidth * EFFICIENCY))
    assert cost.draft_s == 0


def test_a_round_is_read_once_a_draft(tmp_path: Path) -> None:
    folder, drafter = model(tmp_path / "model"), model(tmp_path / "drafter")
    one, two, four = (estimate(folder, "draft_model", drafter, k, 2, 50, "gaudi2").draft_s for k in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one))
    first = Outline.of(drafter).tally(batch=2, queries=2, context=50).bytes_moved
    assert one == pytest.approx(LAUNCH_SECONDS + first / (CARDS["gaudi2"].memory_bandwidth * EFFICIENCY))
    assert two > one


def test_a_head_borrows_the_output_matrix(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    with_head, borrowed = model(tmp_path / "own"), model(tmp_path / "borrowed", borrows=True)
    costs = [estimate(folder, "eagle", head, 2, 1, 50, "gaudi2").draft_s for head in (with_head, borrowed)]
    assert costs[0] == pytest.approx(costs[1])


def test_what_can_not_be_estimated(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    with pytest.raises(ValueError, match="no estimate of what mtp costs"):
        estimate(folder, "mtp", None, 1, 1, 50, "gaudi2")
    with pytest.raises(ValueError, match=r"needs the model's files: .*config.json"):
        estimate(tmp_path, "ngram", None, 1, 1, 50, "gaudi2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="there are none"):
        estimate(folder, "ngram", None, 1, 1, 50, "gaudi2")
    with pytest.raises(ValueError, match="gaudi4"):
        estimate(model(tmp_path / "other"), "ngram", None, 1, 1, 50, "gaudi4")


@pytest.mark.parametrize(
    "begins", [b"", b"{}", (1 << 40).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b"[" * 9]
)
def test_a_damaged_file(tmp_path: Path, begins: bytes) -> None:
    """Nothing is read that is not there, whatever length its header has."""
    (tmp_path / "model.safetensors").write_bytes(begins)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged .*; copy the model again or name another"):
        tensor_sizes(tmp_path)
