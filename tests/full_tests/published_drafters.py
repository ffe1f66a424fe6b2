"""Block drafters as they are published: the config.json of real checkpoints, at a reduced size, with random weights.

Sizes shrink, and layers are fewer. Flags, kinds of layers, constants, formats, and names of tensors are kept.
published_drafters.json has the configurations, with whose they are and where they were read.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.full_tests import mtp_checkpoints, tiny_models
from tests.full_tests.block_drafters import make_weights, write_checkpoint
from tests.models.architectures import ARCHITECTURES
from tests.models.checkpoints import build

NUM_TARGET_LAYERS = 6
SMALL: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=32,
    vocab_size=tiny_models.VOCAB,
    sliding_window=24,
    swa_window_size=24,
    markov_rank=8,
    selector_rank=8,
    num_target_layers=NUM_TARGET_LAYERS,
    mask_token_id=7,
    dtype="float32",
)
"""Sizes, of those that a configuration has."""


@dataclass(frozen=True)
class Block:
    """A DFlash, DFlash2 or DSpark drafter."""

    target: str
    """Name of the target in architectures.yaml."""
    config: dict[str, Any]
    owns_output: bool = False
    """Whether the checkpoint has copies of the target's embeddings and output matrix."""

    @property
    def is_apart(self) -> bool:
        """Whether it runs in a process of its own: the target's class in vLLM needs torchvision."""
        return ARCHITECTURES[self.target].vision

    @property
    def num_drafts(self) -> int:
        if speculators := self.config.get("speculators_config"):
            return int(speculators["proposal_methods"][0]["speculative_tokens"])
        fields = self.config | self.config.get("dflash_config", {})
        return int(fields["block_size"]) - (0 if "markov_rank" in fields else 1)

    def reduce(self) -> dict[str, Any]:
        """Return the fields of config.json at the reduced size."""
        found = _shrink(self.config)
        for name in ("dflash_config", "transformer_layer_config"):
            if name in found:
                found[name] = _shrink(found[name])
        return found

    def read(self) -> dict[str, Any]:
        """Return the fields of `reduce` under the names of the method's authors."""
        found = self.reduce()
        if "transformer_layer_config" not in found:
            return found
        found |= found.pop("transformer_layer_config")
        found["target_layer_ids"] = [layer - 1 for layer in found.pop("aux_hidden_state_layer_ids")]
        return found | (dict(is_causal=False) if found["sliding_window_non_causal"] else {})

    def save(self, folder: Path) -> tuple[str, dict[str, Any]]:
        """Write the target and the drafter. Return the target's folder and the speculative configuration."""
        target, config = _save_target(self.target, folder / "target"), self.reduce()
        fields, generator = self.read(), np.random.default_rng(0)
        weights = make_weights(fields, generator)
        if fields.get("enable_confidence_head"):
            width = fields["hidden_size"] + fields["markov_rank"] * fields["confidence_head_with_markov"]
            weights["confidence_head.proj.weight"] = torch.tensor(generator.standard_normal((1, width))).float()
            weights["confidence_head.proj.bias"] = torch.zeros(1)
        if self.owns_output:
            weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
            weights["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
        if "d2t" in weights:
            weights["t2d"] = torch.zeros(fields["vocab_size"], dtype=torch.bool)
            weights["t2d"][weights["d2t"] + torch.arange(len(weights["d2t"]))] = True
        if "speculators_config" in config:
            config["speculators_config"]["verifier"]["name_or_path"] = str(folder / "target")
            options = {}  # the checkpoint names its method and k
        else:
            options = dict(
                method="dspark" if "markov_rank" in fields else "dflash", num_speculative_tokens=self.num_drafts
            )
        write_checkpoint(folder / "drafter", config, weights)
        return str(folder / "target"), dict(model=str(folder / "drafter")) | options


def _shrink(fields: dict[str, Any]) -> dict[str, Any]:
    found = fields | {name: size for name, size in SMALL.items() if name in fields}
    if "num_attention_heads" in fields:
        per_key = fields["num_attention_heads"] // fields["num_key_value_heads"]
        found["num_key_value_heads"] = max(1, SMALL["num_attention_heads"] // per_key)
    if "layer_types" in fields:
        found["layer_types"] = fields["layer_types"][-SMALL["num_hidden_layers"] :]
    for name, first in (("target_layer_ids", 0), ("aux_hidden_state_layer_ids", 1)):
        if name in fields:
            found[name] = list(range(first, first + len(fields[name])))
    if "draft_vocab_size" in fields:
        is_full = fields["draft_vocab_size"] == (fields | fields.get("transformer_layer_config", {}))["vocab_size"]
        found["draft_vocab_size"] = SMALL["vocab_size"] if is_full else 300
    return found


def _save_target(name: str, folder: Path) -> Any:
    recipe = ARCHITECTURES[name]
    config = recipe.config | dict(num_hidden_layers=NUM_TARGET_LAYERS)
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"] * NUM_TARGET_LAYERS)[:NUM_TARGET_LAYERS]
    model = build(replace(recipe, config=config))
    mtp_checkpoints.save_model(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | recipe.published))
    return model


PUBLISHED: dict[str, Block] = {
    name: Block(**{key: value for key, value in row.items() if key != "source"})
    for name, row in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
