"""Estimated costs of decode steps on a Gaudi: the emulator's cost model over amounts from a model's files.

No card was measured. Weights, KV and logits are taken to be read once, as bfloat16, by graphs that fuse the rest; the
costs of a launch and a wait, and the share of the peak, are in `emulator/cost.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.drafting.table import DRAFT_MODEL, METHODS, Method, has_model
from vllm_gaudi_spec.emulator.cost import step_seconds
from vllm_gaudi_spec.emulator.counters import Tally
from vllm_gaudi_spec.tools.tune.costs import StepCost

_BYTES = 2
_LOGIT_BYTES = 4
# Forward, sampling, and a report, which is the step's one wait; drafting is one graph more.
_LAUNCHES = 3
# Methods whose drafter has files of its own.
_ESTIMATED: dict[str, Method] = {
    DRAFT_MODEL: METHODS[DRAFT_MODEL],
    UNIVERSAL_DRAFT: METHODS[DRAFT_MODEL],
    **{name: row for name, row in METHODS.items() if row.has_model and not row.in_target},
}


@dataclass(frozen=True)
class Outline:
    """The amounts that a model's steps read and compute."""

    weights: int
    """Those that every step reads: all but an embedding table that is not the output matrix."""
    head_weights: int
    """Of them the output matrix."""
    layers: int
    heads: int
    head_size: int
    kv_values: int
    """Of one token and layer."""
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Outline:
        config = _config(folder)
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        latent = config.get("kv_lora_rank")
        kv_values = 2 * (config.get("num_key_value_heads") or heads) * head_size
        if latent:
            kv_values = latent + config["qk_rope_head_dim"]
        weights, has_head = _count_weights(folder)
        return cls(
            weights=weights,
            head_weights=config["vocab_size"] * config["hidden_size"] if has_head else 0,
            layers=config["num_hidden_layers"],
            heads=heads,
            head_size=head_size,
            kv_values=kv_values,
            vocabulary=config["vocab_size"],
        )

    def tally(self, batch: int, queries: int, context: int) -> Tally:
        """Of one forward of [batch, queries] tokens and its logits. All experts see all tokens, as on a Gaudi here."""
        tokens = batch * queries
        logits = tokens * self.vocabulary * _LOGIT_BYTES
        kv = batch * context * self.layers * self.kv_values * _BYTES
        scores = 4 * tokens * context * self.layers * self.heads * self.head_size
        # Logits are written, and read by the rule.
        moved = self.weights * _BYTES + kv + 2 * logits
        return Tally(bytes_moved=moved, kv_bytes_read=kv, flops=2 * tokens * self.weights + scores)


def estimate(
    target: Path, method: str, drafter: Path | None, num_drafts: int, batch: int, context: int, generation: str
) -> StepCost:
    model = Outline.of(target)
    return StepCost(
        batch=batch,
        plain_s=_step(model.tally(batch, 1, context), generation),
        verify_s=_step(model.tally(batch, num_drafts + 1, context), generation),
        draft_s=_draft_s(model, method, drafter, num_drafts, batch, context, generation),
    )


def _step(tally: Tally, generation: str) -> float:
    tally.add(Tally(launches=_LAUNCHES, host_reads=1))
    return step_seconds(tally, generation)


def _draft_s(
    target: Outline, method: str, drafter: Path | None, num_drafts: int, batch: int, context: int, generation: str
) -> float:
    if not (method == UNIVERSAL_DRAFT or has_model(method)):
        return 0.0
    if method not in _ESTIMATED or drafter is None:
        raise ValueError(f"there is no estimate of what {method} costs; give one of {', '.join(_ESTIMATED)}, or ngram")
    model = Outline.of(drafter)
    work = Tally(launches=1)
    row = _ESTIMATED[method]
    if not row.has_kv:
        # All heads look at one state, each with a vocabulary of its own.
        work.add(Tally(bytes_moved=model.weights * _BYTES, flops=2 * batch * model.weights))
    else:
        # A draft model first reads two tokens a row; a head what was accepted, up to k + 1, in a graph of its own.
        work.launches += row.is_head
        work.add(_borrowing(model, target, num_drafts + 1 if row.is_head else 2).tally_of_reading(batch, context))
        for _ in range(num_drafts - 1):
            work.add(_borrowing(model, target, 1).tally_of_reading(batch, context))
    return step_seconds(work, generation)


@dataclass(frozen=True)
class _Reader:
    model: Outline
    queries: int
    borrowed: int
    """Weights of an output matrix that the drafter takes from the target."""

    def tally_of_reading(self, batch: int, context: int) -> Tally:
        tally = self.model.tally(batch, self.queries, context)
        tally.add(Tally(bytes_moved=self.borrowed * _BYTES, flops=2 * batch * self.borrowed))
        return tally


def _borrowing(model: Outline, target: Outline, queries: int) -> _Reader:
    return _Reader(model, queries, 0 if model.head_weights else target.head_weights)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise ValueError(f"an estimate needs the model's files: {error}") from error
    return config | (config.get("text_config") or {})


def tensor_sizes(folder: Path, files: str = "*.safetensors") -> dict[str, int]:
    """Number of elements of each tensor of a model. Only headers are read."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob(files)):
        try:
            with safe_open(path, "np") as file:  # which reads no header of more than 100 MB, and none beyond the file
                sizes |= {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy the model again or name another") from None
    return sizes


def _count_weights(folder: Path) -> tuple[int, bool]:
    """Weights that a step reads, and whether there is an output matrix among them."""
    sizes = tensor_sizes(folder)
    if not sizes:
        raise ValueError(f"an estimate needs the model's safetensors files; there are none in {folder}")
    has_head = any("lm_head" in name for name in sizes)
    embedding = any("embed_tokens" in name for name in sizes)
    read = sum(size for name, size in sizes.items() if not (has_head and "embed_tokens" in name))
    return read, has_head or embedding
