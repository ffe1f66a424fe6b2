"""A drafter's folder that is damaged, or was made to do harm, ends the start with one line that names it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.full_tests.engines import engine
from tests.full_tests.test_refusals import refusal
from tests.support.marks import quick_and_slow

DEMO = Path(__file__).parents[3] / "demo" / "tiny"
TARGET = str(DEMO / "target")
WEIGHTS = "model.safetensors"


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        file = folder / WEIGHTS
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return rewrite


def fill_tensors(value: float) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: {name: torch.full_like(each, value) for name, each in tensors.items()})


def set_d2t(value: int) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors | {"d2t": torch.full_like(tensors["d2t"], value)})


def truncate(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop_a_part(folder: Path) -> None:
    first, second = (f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    parts = dict.fromkeys(load_file(folder / WEIGHTS), first) | {"x": second}
    (folder / WEIGHTS).rename(folder / first)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[..., :-8].contiguous() for name, tensor in tensors.items()}


def put_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def link_to_itself(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(name)

    return link


def nest_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"a":' * 10**5 + "1" + "}" * 10**5)


def change_tokenizer(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        change(tokenizer)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    return rewrite


def lengthen_texts(tokenizer: dict[str, Any]) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [step] * 3}


def add_tokens(first: int, contents: list[str]) -> Callable[[Path], None]:
    kind = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    tokens = [{"id": first + i, "content": content, **kind} for i, content in enumerate(contents)]
    return change_tokenizer(lambda tokenizer: tokenizer["added_tokens"].extend(tokens))


def backtrack(tokenizer: dict[str, Any]) -> None:
    pattern = {"Regex": "(a+)+$"}
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


# Method, folder of the demo, what is done to it, and words of the refusal.
CASES: dict[str, tuple[str, str, Callable[[Path], None], str]] = {
    "missing matrices": (
        "eagle",
        "eagle",
        change_tensors(lambda tensors: dict(list(tensors.items())[:1])),
        "no weights for",
    ),
    "missing matrices of MTP": (
        "mtp",
        "mtp",
        change_tensors(lambda tensors: dict(item for item in tensors.items() if ".mtp_layers.0.mlp." not in item[0])),
        "no weights for",
    ),
    "half of a file": ("eagle", "eagle", truncate, "is damaged or incomplete"),
    "a missing part": ("eagle", "eagle", drop_a_part, "model-00002-of-00002.safetensors, which is missing"),
    "other shapes": ("eagle", "eagle", change_tensors(narrow), "cannot be loaded"),
    "a pipe": ("eagle", "eagle", put_pipe, "it is not a file"),
    "missing layers": ("eagle3", "eagle3", change_config(eagle_aux_hidden_state_layer_ids=[1, 2, 10**9]), "layers [1"),
    "token ids above the vocabulary": ("eagle3", "eagle3", set_d2t(10**6), "outside of the target's vocabulary"),
    "token ids below the vocabulary": ("eagle3", "eagle3", set_d2t(-(10**6)), "outside of the target's vocabulary"),
    "10 million layers": ("eagle", "eagle", change_config(num_hidden_layers=10**7), "claims 10000000 layers"),
    "10 million layers of a model": (
        "draft_model",
        "target",
        change_config(num_hidden_layers=10**7),
        "claims 10000000",
    ),
    "a huge vocabulary": ("draft_model", "target", change_config(vocab_size=10**9), "cannot be loaded"),
    "a huge width": ("eagle", "eagle", change_config(intermediate_size=2**40), "cannot be loaded"),
    "a file that links to itself": ("eagle", "eagle", link_to_itself("model.safetensors"), "is damaged"),
    "weights that are no numbers": ("eagle", "eagle", fill_tensors(math.nan), "they contain NaN"),
    "a nested index": ("eagle", "eagle", nest_index, "names no weights"),
    "a tokenizer that links to itself": (
        "universal_draft",
        "target",
        link_to_itself("tokenizer.json"),
        "needs its own tokenizer",
    ),
    "a tokenizer that lengthens texts": (
        "universal_draft",
        "target",
        change_tokenizer(lengthen_texts),
        "make a text far longer",
    ),
}
QUICK = ("missing matrices", "missing matrices of MTP", "missing layers", "10 million layers")


@pytest.mark.parametrize("case", quick_and_slow(QUICK, CASES))
def test_hostile_drafter_is_refused(case: str, tmp_path: Path) -> None:
    method, name, damage, said = CASES[case]
    folder = shutil.copytree(DEMO / name, tmp_path / "drafter")
    damage(folder)
    spec_config = dict(method=method, model=str(folder), num_speculative_tokens=3)
    target = str(folder) if method == "mtp" else TARGET  # an MTP checkpoint contains its target
    assert said in refusal(target, speculative_config=spec_config)


@pytest.mark.slow
def test_damaged_target_is_refused(looping_llama: str, tmp_path: Path) -> None:
    truncate(shutil.copytree(looping_llama, tmp_path / "target"))
    assert "is damaged or incomplete" in refusal(str(tmp_path / "target"))


# Drafters that are odd and can be served; the drafts may be wrong, and the texts may not.
SERVED: dict[str, tuple[str, str, Callable[[Path], None], dict[str, str]]] = {
    "infinite weights": ("eagle", "eagle", fill_tensors(math.inf), {}),
    "folders that link to themselves": ("eagle", "eagle", lambda folder: (folder / "again").symlink_to(folder), {}),
    "a pattern that backtracks": (
        "universal_draft",
        "target",
        change_tokenizer(backtrack),
        {"universal_context": "retokenize"},
    ),
    "300,000 added tokens": ("universal_draft", "target", add_tokens(1024, [f"<{i}>" for i in range(300_000)]), {}),
    "a token of 20 million letters": ("universal_draft", "target", add_tokens(1024, ["a" * 20_000_000]), {}),
    "a token id of 2 billion": ("universal_draft", "target", add_tokens(2 * 10**9, ["<huge>"]), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED)
def test_odd_drafter_changes_no_text(case: str, tmp_path: Path) -> None:
    method, name, damage, options = SERVED[case]
    folder = shutil.copytree(DEMO / name, tmp_path / "drafter")
    damage(folder)
    spec_config = dict(method=method, model=str(folder), num_speculative_tokens=3)
    prompts = ["the cat sat", "a" * 40 + "!"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = []
    for drafts in ({}, dict(speculative_config=spec_config, additional_config={"gaudi_spec": options})):
        with engine(TARGET, **drafts) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]
