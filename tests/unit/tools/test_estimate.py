"""Estimates follow from the sizes of a model's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from card_emulator import cost
from card_emulator.cost import (
    CARDS,
    HOST_WAIT_SECONDS,
    KERNEL_SECONDS,
    LATE_KERNEL_SECONDS,
    LAUNCH_SECONDS,
    MEMORY_SHARE,
)
from card_emulator.counters import Tally
from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.cli import estimate as command
from vllm_gaudi_spec.tools.estimate.outline import Outline, tensor_sizes
from vllm_gaudi_spec.tools.estimate.times import Pair

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
    # What is stored as float32 is served in two bytes.
    assert tied.memory == tied.weight_bytes == 2 * tied.weights
    assert untied.memory == 2 * (1000 + 2 * VOCABULARY * HIDDEN)
    assert tied.kv_values == 2 * KV_HEADS * HIDDEN // HEADS


def test_quantised_weights(tmp_path: Path) -> None:
    """Eight bits are a byte a weight; an int32 of a format of four bits is eight weights."""
    folder = model(tmp_path / "model")
    before = Outline.of(folder)
    fp8 = torch.zeros(10, 100).to(torch.float8_e4m3fn)
    save_file({"a.weight": fp8, "b.qweight": torch.zeros(5, 5, dtype=torch.int32)}, folder / "more.safetensors")
    now = Outline.of(folder)
    assert now.weights - before.weights == 1000 + 200
    assert now.weight_bytes - before.weight_bytes == 1000 + 100


def test_a_folder_without_weights(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "whole")
    config.save_pretrained(tmp_path / "config")
    assert Outline.of(tmp_path / "config") == Outline.of(tmp_path / "whole")


def test_amounts_of_a_step(tmp_path: Path) -> None:
    outline = Outline.of(model(tmp_path / "model"))
    tally = outline.tally(batch=3, queries=5, context=100)
    kv = 3 * 100 * LAYERS * (2 * KV_HEADS * 8) * 2
    assert tally.kv_bytes_read == kv
    assert tally.bytes_moved == 2 * outline.weights + kv + 2 * 15 * VOCABULARY * 4
    assert tally.flops == 2 * 15 * outline.weights + 4 * 15 * 100 * LAYERS * HEADS * 8


def test_amounts_of_prompts(tmp_path: Path) -> None:
    """Every token passes the layers, the last one the output matrix; scores are those of a triangle."""
    outline = Outline.of(model(tmp_path / "model"))
    tally = outline.tally_of_prompts(batch=3, tokens=100)
    assert tally.flops == 3 * (2 * 100 * 1000 + 2 * VOCABULARY * HIDDEN + 2 * 100 * 100 * LAYERS * HEADS * 8)


@pytest.mark.parametrize("card", CARDS)
def test_a_step_is_bounded_by_its_card(tmp_path: Path, card: str) -> None:
    folder = model(tmp_path / "model")
    # So wide that the matrices fill the units.
    outline = replace(Outline.of(folder), width=4096)
    pair = Pair(target=outline, method="ngram", num_drafts=3)
    for seconds, queries in ((pair.plain_s(2, 50, card), 1), (pair.verify_s(2, 50, card), 4)):
        fixed = 3 * LAUNCH_SECONDS + HOST_WAIT_SECONDS + outline.kernels_s(2 * queries)
        moved = outline.tally(2, queries, 50).bytes_moved
        # Of so few tokens the arithmetic hardly counts.
        memory = moved / (CARDS[card].memory_bandwidth * MEMORY_SHARE)
        assert seconds - fixed == pytest.approx(memory, rel=0.01)
    assert pair.draft_s(2, 50, card) == 0


@pytest.mark.parametrize(
    ("width", "tokens", "of_a_layer", "each"),
    [
        (HIDDEN, 2, 5, KERNEL_SECONDS),
        (HIDDEN, 64, 7, KERNEL_SECONDS),
        (HIDDEN, 65, 7, LATE_KERNEL_SECONDS),
        (2048, 2, 7, KERNEL_SECONDS),
        (2048, 3, 7, LATE_KERNEL_SECONDS),
    ],
)
def test_what_kernels_add(tmp_path: Path, width: int, tokens: int, of_a_layer: int, each: float) -> None:
    outline = replace(Outline.of(model(tmp_path / "model")), width=width)
    assert outline.kernels_s(tokens) == pytest.approx((LAYERS * of_a_layer + 12) * each)


def test_narrow_matrices_fill_the_units_less() -> None:
    work = Tally(flops=10**15)
    narrow, wide = (cost.step_seconds(work, "h100", width=width) for width in (cost.HALF_WIDTH, 10**9))
    assert narrow / wide == pytest.approx(2, rel=1e-3)


def test_many_tokens_are_bounded_by_arithmetic(tmp_path: Path) -> None:
    outline = Outline.of(model(tmp_path / "model"))
    one, two = (cost.step_seconds(outline.tally_of_prompts(1, tokens), "gaudi2") for tokens in (10**6, 2 * 10**6))
    assert two / one == pytest.approx(4, rel=0.01)  # attention grows with the square


def test_a_round_is_read_once_a_draft(tmp_path: Path) -> None:
    folder, drafter = model(tmp_path / "model"), model(tmp_path / "drafter")
    one, two, four = (Pair.of(folder, "draft_model", drafter, k).draft_s(2, 50, "gaudi2") for k in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one), rel=0.01)
    first = Outline.of(drafter)
    memory = first.tally(batch=2, queries=2, context=50).bytes_moved / (CARDS["gaudi2"].memory_bandwidth * MEMORY_SHARE)
    assert one == pytest.approx(LAUNCH_SECONDS + first.kernels_s(4) + memory, rel=0.01)
    assert two > one


NUM_EXPERTS, TOP_K, OF_EXPERT = 64, 2, 300


def mixture(folder: Path) -> Path:
    """Two layers of so many experts of 300 weights, beside what `model` has and a shared expert of 50."""
    model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= dict(n_routed_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": torch.zeros(10, OF_EXPERT // 10)
        for layer in range(LAYERS)
        for expert in range(NUM_EXPERTS)
    }
    weights["model.layers.0.mlp.shared_experts.up_proj.weight"] = torch.zeros(5, 10)
    save_file(weights, folder / "experts.safetensors")
    return folder


@pytest.mark.parametrize(
    ("tokens", "read", "computed"),
    [
        (1, 3 * TOP_K, TOP_K),  # copied together: read, written and read again
        (10, 3 * 10 * TOP_K, 10 * TOP_K),
        (11, NUM_EXPERTS, NUM_EXPERTS),  # every token sees every expert
        (127, NUM_EXPERTS, NUM_EXPERTS),
        (128, NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** 128), TOP_K),  # Gaudi's operator
    ],
)
def test_experts_are_read_as_the_form_that_computes_them_does(
    tmp_path: Path, tokens: int, read: float, computed: int
) -> None:
    plain, outline = Outline.of(model(tmp_path / "plain")), Outline.of(mixture(tmp_path / "mixture"))
    found, expected = (one.tally(tokens, 1, 50, operator_from=128) for one in (outline, plain))
    assert found.bytes_moved - expected.bytes_moved == pytest.approx(2 * (50 + LAYERS * OF_EXPERT * read), abs=1)
    assert found.flops - expected.flops == 2 * tokens * (50 + LAYERS * OF_EXPERT * computed)
    found, expected = (one.tally_of_prompts(1, tokens, operator_from=128) for one in (outline, plain))
    assert found.bytes_moved - expected.bytes_moved == pytest.approx(2 * (50 + LAYERS * OF_EXPERT * read), abs=1)


def test_drafts_reach_more_experts_than_a_token(tmp_path: Path) -> None:
    """On a card whose operator takes any number of tokens; on a Gaudi 11 tokens are computed with all of them."""
    pair = Pair.of(mixture(tmp_path / "mixture"), "ngram", None, 3)
    experts = pair.target.experts
    assert experts is not None
    reached = [experts.read(queries, 1) for queries in (1, 4)]
    assert reached[0] == pytest.approx(TOP_K)
    assert TOP_K < reached[1] < 4 * TOP_K
    assert pair.verify_s(1, 50, "h200") > pair.plain_s(1, 50, "h200")


def test_copies_of_experts_take_memory(tmp_path: Path) -> None:
    """Of one layer: the next one's take its place."""
    pair = Pair.of(mixture(tmp_path / "mixture"), "ngram", None, 3)
    plain, outline = pair.memory(1, 50, "h200"), pair.target
    assert plain == outline.memory + 50 * outline.kv_bytes
    assert pair.memory(1, 50, "gaudi2") - plain == 4 * TOP_K * OF_EXPERT * 2
    # Verify steps of so many tokens copy nothing any more, those without drafts still do.
    assert pair.memory(5, 50, "gaudi2") - pair.memory(5, 50, "h200") == 5 * TOP_K * OF_EXPERT * 2


def test_a_head_borrows_the_output_matrix(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    with_head, borrowed = model(tmp_path / "own"), model(tmp_path / "borrowed", borrows=True)
    costs = [Pair.of(folder, "eagle", head, 2).draft_s(1, 50, "gaudi2") for head in (with_head, borrowed)]
    assert costs[0] == pytest.approx(costs[1])


def test_heads_of_medusa_have_no_attention(tmp_path: Path) -> None:
    """Their configuration names none; each has a matrix for all drafts, and the outputs are computed once."""
    folder, heads = model(tmp_path / "model"), model(tmp_path / "heads", tied=False)
    fields = json.loads((heads / "config.json").read_text())
    without = {name: value for name, value in fields.items() if "attention" not in name and "key_value" not in name}
    (heads / "config.json").write_text(json.dumps(without))
    pair, target = Pair.of(folder, "medusa", heads, 2), Pair.of(folder)
    assert 0 < pair.draft_s(1, 50, "gaudi2") < pair.plain_s(1, 50, "gaudi2")
    # No KV of theirs grows with the context.
    grown = [one.memory(1, 99, "gaudi2") - one.memory(1, 50, "gaudi2") for one in (pair, target)]
    assert grown[0] == grown[1]


def test_what_can_not_be_estimated(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    with pytest.raises(ValueError, match="an estimate of draft_model reads the drafter's files"):
        Pair.of(folder, "draft_model", None, 1)
    with pytest.raises(ValueError, match="no estimate of what mtp costs"):
        Pair.of(folder, "mtp", None, 1)
    with pytest.raises(ValueError, match=r"needs the model's files: .*config.json"):
        Pair.of(tmp_path)
    with pytest.raises(ValueError, match="gaudi4"):
        Pair.of(folder).plain_s(1, 50, "gaudi4")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no safetensors files, and transformers makes no model of its config.json"):
        Pair.of(folder)
    config = json.loads((folder / "config.json").read_text())
    named = {name: value for name, value in config.items() if name != "num_attention_heads"} | {"n_head": HEADS}
    (folder / "config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match=r"needs num_attention_heads, and the model's config.json has no such field"):
        Pair.of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3NextForCausalLM"]}))
    with pytest.raises(ValueError, match="layers with recurrent states, which Qwen3NextForCausalLM has"):
        Pair.of(folder)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["estimate", *words])
    written = capsys.readouterr()
    return status, written.out, written.err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, drafter = model(tmp_path / "model"), model(tmp_path / "drafter")
    spec = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    words = [str(folder), "--card", "gaudi3", "--batches", "4", "--speculative-config", json.dumps(spec)]
    status, out, _ = run(capsys, *words)
    assert status == 0
    assert "nothing was run on this card" in out
    status, out, _ = run(capsys, *words, "--json")
    (row,) = json.loads(out)["rows"]
    pair = Pair.of(folder, "draft_model", drafter, 2)
    assert row["verify_ms"] == pytest.approx(1e3 * pair.verify_s(4, 1024, "gaudi3"))
    length = 1 + 0.5 + 0.25
    assert row["speedup"]["0.5"] == pytest.approx(length * row["plain_ms"] / (row["verify_ms"] + row["draft_ms"]))
    kv = LAYERS * 2 * KV_HEADS * 8 * 2
    assert row["memory_bytes"] == 2 * (2 * (1000 + VOCABULARY * HIDDEN) + 4 * 1024 * kv)
    assert row["fits"]
    assert tuple(CARDS) == command.CARDS


def test_a_model_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model(tmp_path / "model")
    status, out, _ = run(capsys, str(folder), "--card", "h100", "--batches", "100000", "--context", "100000")
    assert status == 0
    assert out.splitlines()[1].split()[-1] == "no"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"method": "ngram"}, "give a method, and num_speculative_tokens from 1 to"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, "not prompt_lookup_max"),
        ({"method": "draft_model", "model": "some/name", "num_speculative_tokens": 2}, "no folder some/name"),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: dict[str, Any], words: str) -> None:
    status, _, err = run(capsys, str(model(tmp_path / "model")), "--speculative-config", json.dumps(spec))
    assert status == 2
    assert words in err


@pytest.mark.parametrize("name", ["/nonexistent", "some/name"])
def test_no_model_is_downloaded(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, _, err = run(capsys, name)
    assert (status, err) == (
        2,
        f"gaudi-spec estimate: error: an estimate reads a model's files, and there is no folder {name}\n",
    )


@pytest.mark.parametrize(
    "begins", [b"", b"{}", (1 << 40).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b"[" * 9]
)
def test_a_damaged_file(tmp_path: Path, begins: bytes) -> None:
    """Nothing is read that is not there, whatever length its header has."""
    (tmp_path / "model.safetensors").write_bytes(begins)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged .*; copy the model again or name another"):
        tensor_sizes(tmp_path)
