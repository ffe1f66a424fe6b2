"""Block drafters (DFlash, DFlash2, DSpark) with random weights, and a dense reference of each.

The reference knows nothing of KV caches, blocks or steps: from the target's hidden states of a whole text, as
transformers computes them, it computes the logits of the next block at once.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 96, 4, 2, 32, 192
LAYER_IDS = [0, 1, 2]
MASK = 7
EPS = 1e-6
THETA = 1e6
RANK, CANDIDATES, TAPS, GROUP = 8, 16, 3, 16
WINDOW = 24
_READ_FOR_ROPE = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings")


@dataclass(frozen=True)
class Kind:
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of its config.json."""
    num_layers: int = 2
    draft_vocab: int | None = None

    @property
    def method(self) -> str:
        return DSPARK if self.family == DSPARK else DFLASH


def _windows(*layer_types: str) -> dict[str, Any]:
    return dict(
        layer_types=[f"{name}_attention" for name in layer_types], sliding_window=WINDOW, use_sliding_window=True
    )


KINDS = {
    "dflash": Kind(DFLASH),
    "dflash causal": Kind(DFLASH, dict(is_causal=True)),
    "dflash windows": Kind(DFLASH, _windows("sliding", "sliding") | dict(is_causal=False)),
    "dflash mixed windows": Kind(DFLASH, _windows("sliding", "full")),
    "dflash reduced vocabulary": Kind(DFLASH, draft_vocab=300),
    "dflash2": Kind(DFLASH2),
    "dspark": Kind(DSPARK),
    "dspark fill-in": Kind(DSPARK, dict(sample_from_anchor=False)),
    "dspark windows": Kind(DSPARK, _windows("sliding", "sliding") | dict(is_causal=False)),
    "dspark reduced vocabulary": Kind(DSPARK, draft_vocab=300),
}


def make_drafter(folder: Path, kind: Kind, target: str, seed: int = 0) -> str:
    """Write a checkpoint in the format of the method's authors."""
    vocab = json.loads((Path(target) / "config.json").read_text())["vocab_size"]
    config: dict[str, Any] = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=kind.num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        max_position_embeddings=2048,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        attention_bias=False,
        tie_word_embeddings=False,
        dtype="float32",
        block_size=8,
    )
    named = dict(mask_token_id=MASK, target_layer_ids=LAYER_IDS)
    if kind.family == DSPARK:
        config |= named | dict(architectures=["Qwen3DSparkModel"], markov_rank=RANK)
    else:
        config["dflash_config"] = named
    if kind.family == DFLASH2:
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= dict(
            conv_kernel_size=TAPS, conv_group_size=GROUP, selector_rank=RANK, selector_top_k=CANDIDATES
        )
    if kind.draft_vocab is not None:
        config["draft_vocab_size"] = kind.draft_vocab
    return write_checkpoint(folder, config | kind.options, make_weights(config, np.random.default_rng(seed)))


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def make_weights(config: dict[str, Any], generator: np.random.Generator) -> dict[str, Tensor]:
    """Return random weights for a configuration whose fields all stand at the top level or in `dflash_config`."""
    fields = config.get("dflash_config", {}) | config
    hidden, intermediate, head_dim, vocab = (
        fields[name] for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
    )
    query, kv = (fields[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    draft_vocab = fields.get("draft_vocab_size") or vocab

    def matrix(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.tensor(scale * shape[-1] ** -0.5 * generator.standard_normal(shape), dtype=torch.float32)

    def norm(size: int) -> Tensor:
        return torch.tensor(1 + 0.1 * generator.standard_normal(size), dtype=torch.float32)

    weights = {"fc.weight": matrix(hidden, hidden * len(fields["target_layer_ids"]))}
    weights |= {"hidden_norm.weight": norm(hidden), "norm.weight": norm(hidden)}
    for layer in range(fields["num_hidden_layers"]):
        weights |= {
            f"layers.{layer}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": norm(hidden),
                "post_attention_layernorm": norm(hidden),
                "self_attn.q_proj": matrix(query, hidden),
                "self_attn.k_proj": matrix(kv, hidden),
                "self_attn.v_proj": matrix(kv, hidden),
                "self_attn.o_proj": matrix(hidden, query),
                "self_attn.q_norm": 2 * norm(head_dim),
                "self_attn.k_norm": norm(head_dim),
                "mlp.gate_proj": matrix(intermediate, hidden),
                "mlp.up_proj": matrix(intermediate, hidden),
                "mlp.down_proj": matrix(hidden, intermediate),
            }.items()
        }
        if fields.get("attention_bias"):
            for name, size in dict(q=query, k=kv, v=kv, o=hidden).items():
                weights[f"layers.{layer}.self_attn.{name}_proj.bias"] = norm(size) - 1
    if rank := fields.get("markov_rank"):
        weights["markov_head.markov_w1.weight"] = matrix(vocab, rank, scale=4)
        weights["markov_head.markov_w2.weight"] = matrix(draft_vocab, rank, scale=4)
    if taps := fields.get("conv_kernel_size"):
        rank, mixed = fields["selector_rank"], 2 * taps * hidden // fields["conv_group_size"]
        for layer in range(fields["num_hidden_layers"]):
            for name in ("attention_conv", "mlp_conv"):
                base = matrix(2, taps, hidden, scale=3)
                base[:, 0] += 1
                weights[f"layers.{layer}.{name}.base_kernel"] = base
                weights[f"layers.{layer}.{name}.kernel_projection.weight"] = matrix(mixed, hidden)
        weights["candidate_selector.predecessor_codebook"] = matrix(vocab, rank, scale=4)
        weights["candidate_selector.successor_codebook"] = matrix(vocab, rank, scale=4)
        weights["candidate_selector.hidden_projection.weight"] = matrix(rank, hidden)
    if draft_vocab != vocab:
        ids = np.sort(generator.permutation(vocab)[:draft_vocab])
        weights["d2t"] = torch.tensor(ids - np.arange(draft_vocab))
        weights["lm_head.weight"] = matrix(draft_vocab, hidden)
    return weights


class BlockReference:
    """Logits of a drafter's blocks, from whole texts."""

    def __init__(self, folder: str, target: str, fields: dict[str, Any] | None = None) -> None:
        """Read the drafter in `folder`.

        Args:
            fields: Its configuration, if the checkpoint is not in the format of the method's authors.
        """
        self.weights = load_file(Path(folder) / "model.safetensors")
        fields = fields or json.loads((Path(folder) / "config.json").read_text())
        self.config = fields | fields.get("dflash_config", {})
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.embeddings = self.target.get_input_embeddings().weight.detach()
        self.output = self.weights.get("lm_head.weight", self.target.get_output_embeddings().weight.detach())
        self.is_markov = "markov_rank" in self.config
        self.selects = "selector_rank" in self.config
        self.rotation = _find_rotation(self.config)

    @torch.no_grad()
    def continue_text(self, prompt: list[int], num_tokens: int) -> list[int]:
        text = list(prompt)
        for _ in range(num_tokens):
            text.append(int(self.target(torch.tensor([text])).logits[0, -1].argmax()))
        return text[len(prompt) :]

    @torch.no_grad()
    def block_logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """Return the logits [len(drafts), V] of the tokens after `text`, each given the drafts before it."""
        anchors = 0 if self.is_markov and self.config.get("sample_from_anchor", True) else 1
        hidden_KH = self._run(text, anchors + len(drafts))[anchors:]
        vocab = len(self.embeddings)
        logits_KU = hidden_KH @ self.output.T
        before = [text[-1], *drafts[:-1]]
        if self.selects:
            return self._select(logits_KU, hidden_KH, before)
        if self.is_markov:
            embedded_KR = self.weights["markov_head.markov_w1.weight"][before]
            logits_KU = logits_KU + embedded_KR @ self.weights["markov_head.markov_w2.weight"].T
        if (offsets := self.weights.get("d2t")) is None:
            return logits_KU
        spread_KV = torch.full((len(drafts), vocab), -torch.inf)
        spread_KV[:, offsets + torch.arange(len(offsets))] = logits_KU
        return spread_KV

    def _select(self, logits_KV: Tensor, hidden_KH: Tensor, before: list[int]) -> Tensor:
        scores_KV = torch.full_like(logits_KV, -torch.inf)
        before_VR, after_VR, projection = (
            self.weights[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        projected_KR = hidden_KH @ projection.T
        for place, token in enumerate(before):
            ids = logits_KV[place].topk(self.config["selector_top_k"]).indices
            edges = after_VR[ids] @ (before_VR[token] * projected_KR[place])
            scores_KV[place, ids] = logits_KV[place, ids] + edges
        return scores_KV

    def _run(self, text: list[int], num_queries: int) -> Tensor:
        """Return the final hidden states [Q, H] of a block that begins with the text's last token."""
        states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        layers_TH = torch.cat([states[layer + 1][0, :-1] for layer in self.config["target_layer_ids"]], dim=-1)
        context_TH = self._norm(layers_TH @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"])
        hidden_QH = self.embeddings[[text[-1], *[self.config["mask_token_id"]] * (num_queries - 1)]]
        for layer in range(self.config["num_hidden_layers"]):
            hidden_QH = self._layer(layer, hidden_QH, context_TH)
        return self._norm(hidden_QH, self.weights["norm.weight"])

    def _layer(self, layer: int, hidden_QH: Tensor, context_TH: Tensor) -> Tensor:
        weight = {
            name.removeprefix(f"layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in self.weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed_QH = self._norm(hidden_QH, weight["input_layernorm"])
        hidden_QH = hidden_QH + self._convolved(
            "attention_conv", normed_QH, weight, lambda x_QH: self._attend(layer, x_QH, context_TH, weight)
        )
        normed_QH = self._norm(hidden_QH, weight["post_attention_layernorm"])
        return hidden_QH + self._convolved("mlp_conv", normed_QH, weight, lambda x_QH: _mlp(x_QH, weight))

    def _convolved(self, name: str, x_QH: Tensor, weight: dict[str, Tensor], between: Any) -> Tensor:
        """DFlash2 mixes each token with those before it in its block, before and after attention and MLP."""
        if not self.selects:
            return between(x_QH)
        taps, group = self.config["conv_kernel_size"], self.config["conv_group_size"]
        mixed = (x_QH @ weight[f"{name}.kernel_projection"].T).view(len(x_QH), 2, taps, -1).repeat_interleave(group, -1)
        kernels_Q2CH = weight[f"{name}.base_kernel"] + mixed

        def convolve(states_QH: Tensor, side: int) -> Tensor:
            return sum(
                kernels_Q2CH[:, side, tap] * F.pad(states_QH, (0, 0, tap, 0))[: len(states_QH)] for tap in range(taps)
            )

        return convolve(between(convolve(x_QH, 0)), 1)

    def _attend(self, layer: int, x_QH: Tensor, context_TH: Tensor, weight: dict[str, Tensor]) -> Tensor:
        num_context = len(context_TH)
        positions = torch.arange(num_context + len(x_QH))
        own_positions = positions[num_context:]

        head_dim = self.config["head_dim"]

        def project(name: str, states: Tensor) -> Tensor:
            bias = weight.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
            return (states @ weight[f"self_attn.{name}_proj"].T + bias).view(len(states), -1, head_dim).transpose(0, 1)

        everything = torch.cat((context_TH, x_QH))
        query = self._rotate(self._norm(project("q", x_QH), weight["self_attn.q_norm"]), own_positions)
        key = self._rotate(self._norm(project("k", everything), weight["self_attn.k_norm"]), positions)
        groups = len(query) // len(key)
        key, value = (part.repeat_interleave(groups, 0) for part in (key, project("v", everything)))
        scores = query @ key.transpose(1, 2) * head_dim**-0.5
        scores = scores.masked_fill(~self._is_visible(layer, own_positions[:, None], positions), -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        return attended @ weight["self_attn.o_proj"].T + weight.get("self_attn.o_proj.bias", 0.0)

    def _is_visible(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        window = self.config.get("layer_types", ["full_attention"] * 8)[layer] == "sliding_attention"
        causal = self.config.get("is_causal", window)
        seen = (key <= query) if causal else torch.ones_like(query - key, dtype=torch.bool)
        return seen & ((query - key).abs() < self.config["sliding_window"]) if window else seen

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _rotate(self, heads_KTD: Tensor, positions: Tensor) -> Tensor:
        frequencies, scale = self.rotation
        angles = positions[:, None] * frequencies
        cosine, sine = scale * angles.cos(), scale * angles.sin()
        left, right = heads_KTD.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


def _find_rotation(config: dict[str, Any]) -> tuple[Tensor, float]:
    """Return the frequencies of rotary embeddings, and what they are scaled by."""
    head_dim = config["head_dim"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config["rope_theta"]
    if rope.get("rope_type", "default") == "default":
        return theta ** (-torch.arange(0, head_dim, 2) / head_dim), 1.0
    read = Qwen3Config(**{name: config[name] for name in _READ_FOR_ROPE}, rope_parameters=rope | {"rope_theta": theta})
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](read, torch.device("cpu"))


def _mlp(x_QH: Tensor, weight: dict[str, Tensor]) -> Tensor:
    return (F.silu(x_QH @ weight["mlp.gate_proj"].T) * (x_QH @ weight["mlp.up_proj"].T)) @ weight["mlp.down_proj"].T
