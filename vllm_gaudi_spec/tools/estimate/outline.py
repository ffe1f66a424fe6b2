"""The amounts that a model's steps read and compute, from its files: headers alone are read.

Weights, KV and logits are taken to be read once, by graphs that fuse the rest; experts as the form that computes them
reads them (`devices/common/experts.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from vllm_gaudi_spec.devices.common.expert_forms import COST_OF_GATHERING, GATHERED_BYTES_AT_ONCE, num_gathered
from vllm_gaudi_spec.recurrent.table import SERVED

if TYPE_CHECKING:
    from card_emulator.counters import Tally

_KV_BYTES = 2
_LOGIT_BYTES = 4
# What our CUDA backend starts one after the other in a dense layer: four products, attention and two norms, which in a
# narrow model are within the products of one or two tokens (`devices/cuda/decoder.py`). And once a step.
_KERNELS_OF_A_LAYER = 7
_NORMS_OF_A_LAYER = 2
_KERNELS_OF_A_STEP = 12
# Up to so many tokens, and in a model of up to so many numbers a token up to so many more, all of them start early.
_FEW_TOKENS = 2
_NARROW, _SOME_TOKENS = 1024, 64
# As served: what is stored in more bits is loaded as bfloat16.
_FLOATS = ("F64", "F32", "F16", "BF16")
_FLOAT_BYTES = 2
# Formats of four bits pack so many weights into one integer.
_PACKED = {"I32": 8, "U8": 2}
_BYTES = {"I64": 8, "I32": 4, "I16": 2}


class Stored(NamedTuple):
    """A tensor in a model's files."""

    elements: int
    dtype: str
    """As safetensors names it."""

    @property
    def weights(self) -> int:
        return self.elements * _PACKED.get(self.dtype, 1)

    @property
    def num_bytes(self) -> int:
        return self.elements * (_FLOAT_BYTES if self.dtype in _FLOATS else _BYTES.get(self.dtype, 1))


# Of weights of experts that tokens choose; shared ones are read as others are.
_OF_EXPERTS = (".experts.", ".block_sparse_moe.input_linear.", ".block_sparse_moe.output_linear.")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


class Experts(NamedTuple):
    """Those that tokens choose, of a model's layers, which have as many each."""

    weights: int
    """Of all of them."""
    num_bytes: int
    layers: int
    number: int
    """Of a layer."""
    chosen: int
    """By a token, of a layer."""

    @classmethod
    def of(cls, config: dict[str, Any], stored: dict[str, Stored]) -> Experts | None:
        found = {name: one for name, one in stored.items() if any(part in name for part in _OF_EXPERTS)}
        number, chosen = (_largest(config, names) for names in (_NUM_EXPERTS, _TOP_K))
        if not found or not number or not chosen:
            return None
        layers = {name.partition(part)[0] for name in found for part in _OF_EXPERTS if part in name}
        weights, num_bytes = (sum(getattr(one, what) for one in found.values()) for what in ("weights", "num_bytes"))
        return cls(weights, num_bytes, len(layers), number, chosen)

    def read(self, tokens: int, operator_from: int) -> float:
        """How often the weights of one are read by a forward of so many tokens, in each layer."""
        if self._has_operator(tokens, operator_from):
            # As many as tokens reach that choose with equal chances, and independently.
            return self.number * (1 - (1 - self.chosen / self.number) ** tokens)
        return COST_OF_GATHERING * num_gathered(tokens, self.chosen, self.number) or self.number

    def computed(self, tokens: int, operator_from: int) -> int:
        """With how many a token is computed, whether it chose them or not."""
        if self._has_operator(tokens, operator_from):
            return self.chosen
        return num_gathered(tokens, self.chosen, self.number) or self.number

    def gathered_bytes(self, tokens: int, operator_from: int) -> int:
        """Copies of weights that are there at once."""
        if self._has_operator(tokens, operator_from):
            return 0
        one = self.num_bytes // (self.layers * self.number)
        return min(num_gathered(tokens, self.chosen, self.number) * one, max(GATHERED_BYTES_AT_ONCE, one))

    def _has_operator(self, tokens: int, operator_from: int) -> bool:
        return tokens >= operator_from and self.chosen < self.number


def _largest(config: dict[str, Any], names: tuple[str, ...]) -> int:
    """Some configurations have one number for each layer."""
    found = next((config[name] for name in names if config.get(name)), 0)
    return max(found) if isinstance(found, list) else int(found)


@dataclass(frozen=True, kw_only=True)
class Outline:
    weights: int
    """Those that a step may read: all but an embedding table that is not the output matrix."""
    weight_bytes: int
    """Of these, as served."""
    memory: int
    """Bytes of all weights."""
    head_weights: int
    """Of them the output matrix; 0 if another model lends it."""
    layers: int
    width: int
    """Of hidden states."""
    heads: int
    head_size: int
    kv_values: int
    """Of one token and layer."""
    vocabulary: int
    experts: Experts | None = None

    @classmethod
    def of(cls, folder: Path, *, has_attention: bool = True) -> Outline:
        """`has_attention`: heads of Medusa have none, nor fields about it."""
        config = _config(folder)
        if recurrent := SERVED.keys() & set(config.get("architectures") or ()):
            raise ValueError(f"no estimate is made of layers with recurrent states, which {recurrent.pop()} has")
        heads = config["num_attention_heads"] if has_attention else 0
        head_size = (config.get("head_dim") or config["hidden_size"] // heads) if has_attention else 0
        latent = config.get("kv_lora_rank")
        kv_values = 2 * (config.get("num_key_value_heads") or heads) * head_size
        if latent:
            # Beside it the key of an indexer, in every layer: those that share a selection are few.
            kv_values = latent + config["qk_rope_head_dim"] + config.get("index_head_dim", 0)
        stored = dict(_stored(folder, "*.safetensors")) or _described(folder)
        has_head = any("lm_head" in name for name in stored)
        read = [one for name, one in stored.items() if not (has_head and "embed_tokens" in name)]
        has_logits = has_head or any("embed_tokens" in name for name in stored)
        return cls(
            weights=sum(one.weights for one in read),
            weight_bytes=sum(one.num_bytes for one in read),
            memory=sum(one.num_bytes for one in stored.values()),
            head_weights=config["vocab_size"] * config["hidden_size"] if has_logits else 0,
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=heads,
            head_size=head_size,
            kv_values=kv_values,
            vocabulary=config["vocab_size"],
            experts=Experts.of(config, stored),
        )

    @property
    def kv_bytes(self) -> int:
        """Of one token in all layers."""
        return self.layers * self.kv_values * _KV_BYTES

    def kernels_s(self, tokens: int) -> float:
        """What the kernels of one forward add to what they read and compute."""
        from card_emulator.cost import kernels_seconds

        is_narrow, is_few = self.width <= _NARROW, tokens <= _FEW_TOKENS
        of_a_layer = _KERNELS_OF_A_LAYER - (_NORMS_OF_A_LAYER if is_narrow and is_few else 0)
        number = self.layers * of_a_layer + _KERNELS_OF_A_STEP
        return kernels_seconds(number, start_early=is_few or (is_narrow and tokens <= _SOME_TOKENS))

    def tally(self, batch: int, queries: int, context: int, *, borrowed: int = 0, operator_from: int = 1) -> Tally:
        """Of one forward of [batch, queries] tokens and its logits. `borrowed`: weights of an output matrix that is
        another model's. `operator_from`: tokens from which on the card's operator for experts is used."""
        from card_emulator.counters import Tally

        tokens = batch * queries
        kv = batch * context * self.kv_bytes
        scores = 4 * tokens * context * self.layers * self.heads * self.head_size
        # Logits are written, and read by the rule.
        logits = 2 * tokens * self.vocabulary * _LOGIT_BYTES
        return Tally(
            bytes_moved=self._bytes_of(tokens, operator_from) + borrowed * _FLOAT_BYTES + kv + logits,
            kv_bytes_read=kv,
            flops=2 * tokens * (self._weights_of(tokens, operator_from) + borrowed) + scores,
        )

    def tally_of_prompts(self, batch: int, tokens: int, *, operator_from: int = 1) -> Tally:
        """Of prompts that are computed whole: each token sees half of them on average, and the last one has logits."""
        tally = self.tally(batch, 1, tokens, operator_from=operator_from)
        all_tokens = batch * tokens
        tally.bytes_moved += self._bytes_of(all_tokens, operator_from) - self._bytes_of(batch, operator_from)
        body, scores = self._weights_of(all_tokens, operator_from) - self.head_weights, 2 * all_tokens * tokens
        tally.flops = (
            2 * batch * (tokens * body + self.head_weights) + scores * self.layers * self.heads * self.head_size
        )
        return tally

    def _bytes_of(self, tokens: int, operator_from: int) -> int:
        """Of weights that a forward moves."""
        experts = self.experts
        if experts is None:
            return self.weight_bytes
        share = experts.read(tokens, operator_from) / experts.number
        return self.weight_bytes + round(experts.num_bytes * (share - 1))

    def _weights_of(self, tokens: int, operator_from: int) -> int:
        """That each token is multiplied with."""
        experts = self.experts
        if experts is None:
            return self.weights
        return (
            self.weights
            - experts.weights * (experts.number - experts.computed(tokens, operator_from)) // experts.number
        )


class _Config(dict[str, Any]):
    """Fields of a configuration file. Some families name a size otherwise (`n_head`)."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"an estimate needs {name}, and the model's config.json has no such field")


def _config(folder: Path) -> _Config:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise ValueError(f"an estimate needs the model's files: {error}") from error
    return _Config(config | (config.get("text_config") or {}))


def tensor_sizes(folder: Path, files: str = "*.safetensors") -> dict[str, int]:
    """Number of elements of each tensor of a model."""
    return {name: stored.elements for name, stored in _stored(folder, files)}


def _stored(folder: Path, files: str) -> Iterator[tuple[str, Stored]]:
    for path in sorted(folder.glob(files)):
        try:
            with safe_open(path, "np") as file:  # which reads no header of more than 100 MB, and none beyond the file
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    yield name, Stored(math.prod(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy the model again or name another") from None


def _described(folder: Path) -> dict[str, Stored]:
    """Of a folder without weights, as transformers would make them in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has no safetensors files, and transformers makes no model of its config.json: {error}"
        ) from error
    # A tied output matrix is no parameter of its own.
    return {name: Stored(weight.numel(), "BF16") for name, weight in model.named_parameters()}
