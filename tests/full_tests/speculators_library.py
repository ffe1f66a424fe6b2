"""Block drafters in the format of the library speculators, and what the library itself computes with them.

The library is not installed with the tests: speculators_logits.json has what its release 0.9.0 computed, recorded by
this file at commit 6e63f5e8.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.full_tests.block_drafters import Kind, write_checkpoint
from tests.full_tests.heads import target, text

RECORDED = Path(__file__).with_name("speculators_logits.json")
TARGET = target("dflash")
K = 4
LENGTHS = {
    "dflash": (12, 65),
    "dflash windows": (12,),
    "dflash mixed windows": (12,),
    "dflash reduced vocabulary": (12, 65),
    "dflash2": (12, 65),
    "dspark": (12, 65),
    "dspark fill-in": (12, 65),
    "dspark windows": (12,),
    "dspark reduced vocabulary": (12, 65),
}
"""Kinds that the library has -> lengths of texts. There a window is counted from the anchor for the whole block, in
vLLM and here from each query, so texts of those kinds are shorter than the window."""
_NOT_OF_THE_LAYERS = ("architectures", "dflash_config", "draft_vocab_size", "block_size", "is_causal")
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def rewrite_drafter(source: str, folder: Path, kind: Kind, num_drafts: int, verifier: str = TARGET) -> str:
    """Write the drafter in `source`, of `make_drafter`, as the library saves its own."""
    config = json.loads((Path(source) / "config.json").read_text())
    options = config.pop("dflash_config", None) or {
        name: config.pop(name) for name in ("mask_token_id", "target_layer_ids", "markov_rank")
    }
    weights = load_file(Path(source) / "model.safetensors")
    vocab, theta = config["vocab_size"], config.pop("rope_theta")
    sample_from_anchor = config.pop("sample_from_anchor", kind.family == "dspark")
    written: dict[str, Any] = {
        "architectures": [{"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind.family] + "DraftModel"],
        "speculators_model_type": kind.family,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in options["target_layer_ids"]],
        "block_size": num_drafts + (0 if sample_from_anchor else 1),
        "draft_vocab_size": kind.draft_vocab or vocab,
        "dtype": config["dtype"],
        "mask_token_id": options["mask_token_id"],
        "sample_from_anchor": sample_from_anchor,
        "sliding_window_non_causal": not config.get("is_causal", True),
        "speculators_config": {
            "algorithm": kind.family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {name: config[name] for name in config if name not in _NOT_OF_THE_LAYERS}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
    }
    if kind.family == "dflash2":
        written |= {name: options[name] for name in _SELECTOR}
    if kind.family == "dspark":
        written |= dict(
            markov_rank=options["markov_rank"],
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        )
        weights["confidence_head.proj.weight"] = torch.ones(1, config["hidden_size"] + options["markov_rank"])
        weights["confidence_head.proj.bias"] = torch.zeros(1)
    if kind.draft_vocab is not None:
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        weights["t2d"][weights["d2t"] + torch.arange(kind.draft_vocab)] = True
    return write_checkpoint(folder, written, weights)


def split_text(length: int) -> tuple[list[int], list[int]]:
    """Return a text of `length` tokens and K tokens to stand for its drafts."""
    tokens = text(length + K)
    return tokens[:length], tokens[length:]
