"""A plain Llama for training, with the parameter names of Hugging Face checkpoints."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MAX_POSITIONS = 2048

# (layer, queries, keys, values), each [B, heads, T, head_dim], to the attention's output; where a cache comes in
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """Out of a config.json, of either spelling of the rotary base."""
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn=config["intermediate_size"],
            eps=config.get("rms_norm_eps", 1e-5),
            theta=config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
        )


def rope_table(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [length, head_dim] each; in float64 until the end, since positions are large numbers."""
    powers = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] / shape.theta**powers
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape, width: int) -> None:
        """`width` is that of its input; its output is as wide as the model."""
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        rows, length, _ = x.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for project in projections)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps) if input_norm else nn.Identity()
        self.self_attn, self.mlp = Attention(shape, shape.hidden), MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Rotary(nn.Module):
    """What turns its queries and keys by their positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.rope: tuple[Tensor, Tensor] | None = None

    def turns(self, positions: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `like` [B, T, ...]; without positions [B, T] they count from 0 in every row."""
        if self.rope is None:
            self.rope = rope_table(self.shape, MAX_POSITIONS, like.device)
        cos, sin = self.rope
        if positions is None:
            return cos[: like.shape[1]], sin[: like.shape[1]]
        return cos[positions][:, None], sin[positions][:, None]


class Llama(Rotary):
    """Answers with the hidden states after the final norm; logits are these times the embedding, which is tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)

    @property
    def output(self) -> Tensor:
        return self.embed_tokens.weight

    def forward(self, ids: Tensor, positions: Tensor | None = None, attend: Attend = causal) -> Tensor:
        return self.streams(ids, positions, attend)[-1]

    def streams(self, ids: Tensor, positions: Tensor | None = None, attend: Attend = causal) -> list[Tensor]:
        """The residual stream before every layer and after the last, and then what the final norm makes of it."""
        cos, sin = self.turns(positions, ids)
        streams = [self.embed_tokens(ids)]
        for i, layer in enumerate(self.layers):
            streams.append(layer(streams[-1], cos, sin, partial(attend, i)))
        return [*streams, self.norm(streams[-1])]


def load(folder: Path, device: str, dtype: torch.dtype) -> Llama:
    model = Llama(Shape.of(json.loads((folder / "config.json").read_text())))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items() if k != "lm_head.weight"})
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def save(folder: Path, config: dict[str, Any], model: Llama) -> None:
    save_weights(folder, config, {f"model.{name}": value for name, value in model.state_dict().items()})


def llama_config(**specific: Any) -> dict[str, Any]:
    """The contents of config.json: shared by every Llama here, with those `specific` to this one."""
    every: dict[str, Any] = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        initializer_range=0.02,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        use_cache=True,
        dtype="bfloat16",
        torch_dtype="bfloat16",
    )
    return every | specific


def save_weights(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Floating-point weights in bfloat16, others as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    floats = {name: value.to(torch.bfloat16) for name, value in weights.items() if value.is_floating_point()}
    weights = {name: value.detach().cpu().contiguous().clone() for name, value in (weights | floats).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
