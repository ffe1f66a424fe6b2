"""Drafting heads: the trained tiny family in demo/, and text for it."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.full_tests.prompts import PROMPTS

TINY = Path(__file__).parents[2] / "demo" / "tiny"
METHODS = ("eagle", "eagle3", "mtp", "medusa")
MAX_LEN = 512


def target(method: str) -> str:
    """The model that a head of this kind was trained for. One with an MTP layer brings its head along."""
    return str(TINY / ("mtp" if method == "mtp" else "target"))


def head(method: str, k: int, **options: Any) -> dict[str, Any]:
    model = {} if method == "mtp" else {"model": str(TINY / method)}
    return dict(method=method, num_speculative_tokens=k, **model, **options)


def with_four_heads(folder: str, copy: Path) -> str:
    """The tiny Llama, or a head for it, with a fourth attention head that says nothing: of three, two ranks cannot
    have as many each."""
    shutil.copytree(folder, copy)
    described = json.loads((copy / "config.json").read_text())
    size, missing = described["head_dim"], 4 - described["num_attention_heads"]
    (copy / "config.json").write_text(json.dumps(described | {"num_attention_heads": 4}))
    weights = load_file(copy / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = torch.cat((weight, weight.new_zeros(missing * size, weight.shape[1])))
        elif name.endswith("o_proj.weight"):
            weights[name] = torch.cat((weight, weight.new_zeros(weight.shape[0], missing * size)), dim=1)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)


@cache
def _tokens() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target("eagle"))
    return [tokenizer.encode(text) for text in PROMPTS]


def text(length: int, first: int = 0) -> list[int]:
    """So many tokens of readable text. Texts with another `first` begin otherwise."""
    whole = [token for tokens in _tokens()[first:] for token in tokens]
    whole *= 1 + length // len(whole)
    return whole[:length]


def texts() -> list[list[int]]:
    """Prompts as they come, and some of more than a chunk and of more than a block."""
    return [*_tokens(), *(text(length, first) for first, length in enumerate((31, 32, 33, 64, 65, 100, 129, 200, 333)))]


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)
