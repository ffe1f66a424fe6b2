"""Training on the sampled text: what all drafters share, and the two that are models of their own."""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llama import Llama, Shape, llama_config
from other_tokenizer import token_bytes
from tokenizers import Tokenizer
from torch import Tensor, nn
from training_prompts import TURN_END, TURN_START

HIDDEN = 256
LENGTH_STEP = 32
BATCHES_HELD_OUT = 40
START_STD = 0.06


@dataclass(frozen=True)
class Plan:
    """How one drafter is trained."""

    layers: int
    batch_tokens: int
    peak_rate: float
    seconds: float
    log_every: int
    device: str

    def autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)


# ---- data --------------------------------------------------------------------------------------------------


class Samples:
    """Token sequences of any length one after another on the device, dealt in batches of similar length."""

    def __init__(self, file: Path, device: str) -> None:
        stored = np.load(file)
        self.offsets, self.held_out = stored["offsets"], stored["held_out"]
        self.prompt_lengths = stored["prompt_lengths"].astype(np.int64)
        self.lengths = self.offsets[1:] - self.offsets[:-1]
        self.tokens = torch.from_numpy(stored["tokens"].astype(np.int32)).to(device)
        self.device = device

    def batches(self, held_out: bool, size: int, rng: np.random.Generator) -> list["Batch"]:
        """Shuffled, each of about `size` tokens with its padding."""
        chosen = (self.held_out == held_out) & (self.lengths > self.prompt_lengths + 2)
        batches = self.in_batches(np.flatnonzero(chosen), size, rng)
        rng.shuffle(batches)
        return batches

    def in_batches(self, members: np.ndarray, size: int, rng: np.random.Generator | None = None) -> list["Batch"]:
        padded = -(-self.lengths[members] // LENGTH_STEP) * LENGTH_STEP
        batches = []
        for length in np.unique(padded).tolist():
            alike = members[padded == length]
            if rng is not None:
                alike = rng.permutation(alike)
            step = max(1, size // length)
            batches += [Batch(self, alike[i : i + step], length) for i in range(0, len(alike), step)]
        return batches


@dataclass(frozen=True)
class Batch:
    samples: Samples
    members: np.ndarray
    length: int

    @property
    def num_tokens(self) -> int:
        return len(self.members) * self.length

    def flat_positions(self) -> Tensor:
        """[B, T]: where each token is among all; padding repeats a sample's last."""
        last = self.samples.lengths[self.members][:, None] - 1
        return self.put(self.samples.offsets[self.members][:, None] + np.minimum(np.arange(self.length), last))

    def trained(self, first: int) -> Tensor:
        """The flat positions that carry a loss: from `first`, counted from the first generated token, to the last but
        one."""
        positions = np.arange(self.length)[None]
        start = (self.samples.prompt_lengths[self.members] + first)[:, None]
        last = (self.samples.lengths[self.members] - 2)[:, None]
        return self.put(np.flatnonzero((positions >= start) & (positions <= last)))

    def real(self) -> Tensor:
        """[B, T]: which positions are no padding."""
        return self.put(np.arange(self.length) < self.samples.lengths[self.members][:, None])

    def put(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.samples.device == "cpu":
            return tensor
        return tensor.pin_memory().to(self.samples.device, non_blocking=True)


@torch.no_grad()
def target_states(target: Llama, samples: Samples, dtype: torch.dtype, batch_tokens: int = 65536) -> Tensor:
    """The target's hidden states after its final norm for every sampled token, [N, hidden]: its whole distribution, in
    little room and computed once."""
    states = torch.empty(len(samples.tokens), target.shape.hidden, dtype=dtype, device=samples.device)
    for batch in samples.in_batches(np.arange(len(samples.lengths)), batch_tokens):
        flat_positions, real = batch.flat_positions(), batch.real()
        hidden = target(samples.tokens[flat_positions].long())
        states[flat_positions[real]] = hidden[real].to(dtype)
    return states


# ---- the drafter with the target's tokens --------------------------------------------------------------------


def train_same_vocab(
    target: Llama, samples: Samples, states: Tensor, plan: Plan
) -> tuple[Llama, dict[str, Any], dict[str, Any]]:
    """Distilled on the target's whole next-token distribution. Answers with the drafter, its config, and figures."""
    config = draft_config(target.shape.vocab, plan.layers, dict(bos_token_id=1, eos_token_id=2, pad_token_id=2))
    model = fresh_model(config, plan.device)
    teacher = target.output.to(states.dtype)
    model.output.data.copy_(main_directions(teacher))

    def hidden_states(batch: Batch, first: int) -> tuple[Tensor, Tensor]:
        """The drafter's and the target's, one row per position that counts."""
        flat_positions, trained = batch.flat_positions(), batch.trained(first)
        with plan.autocast():
            hidden = model(samples.tokens[flat_positions].long())
        return hidden.flatten(0, 1)[trained], states[flat_positions.flatten()[trained]]

    def loss(batch: Batch) -> Tensor:
        mine, its = hidden_states(batch, -1)
        return SoftCrossEntropy.apply(mine.to(states.dtype), model.output.to(states.dtype), its, teacher)

    figures = fit("draft-same-vocab", model, loss, samples, plan)
    overlap = agreement = count = 0.0
    with torch.no_grad():
        for batch in held_out_batches(samples, plan):
            mine, its = hidden_states(batch, 0)
            q = (mine.float() @ model.output.T).softmax(-1)
            p = (its.float() @ teacher.float().T).softmax(-1)
            overlap += torch.minimum(p, q).sum().item()
            agreement += (p.argmax(-1) == q.argmax(-1)).sum().item()
            count += len(p)
    # What a drafter that sees the right context has accepted: at temperature 1, and at 0.
    return model, config, figures | dict(held_out_overlap=overlap / count, held_out_agreement=agreement / count)


def next_tokens(model: Llama, samples: Samples, batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
    """The logits at the batch's trained positions, and the tokens that follow there."""
    flat_positions, trained = batch.flat_positions(), batch.trained(-1)
    with plan.autocast():
        hidden = model(samples.tokens[flat_positions].long())
        logits = hidden.flatten(0, 1)[trained] @ model.output.T
    return logits.float(), samples.tokens[flat_positions.flatten()[trained] + 1].long()


class SoftCrossEntropy(torch.autograd.Function):
    """Mean over rows of the cross-entropy between softmax(states @ teacher.T) and softmax(hidden @ weight.T), in chunks
    and with the gradient by hand, so that nothing of the vocabulary's width outlives its chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, states: Tensor, teacher: Tensor, chunk: int = 8192) -> Tensor:
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), device=hidden.device)
        for i in range(0, len(hidden), chunk):
            part = hidden[i : i + chunk]
            logs = F.log_softmax(part @ weight.T, -1, dtype=torch.float32)
            p = F.softmax(states[i : i + chunk] @ teacher.T, -1, dtype=torch.float32)
            # The dot product makes no third tensor of that size, but counts its elements in 32 bits.
            loss -= torch.dot(p.view(-1), logs.view(-1)) if p.numel() < 2**31 - 1 else (p * logs).sum()
            gradient = logs.exp_().sub_(p).to(hidden.dtype)
            of_hidden[i : i + chunk] = gradient @ weight
            if of_weight is not None:
                of_weight += gradient.T @ part
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.rows, ctx.dtype = len(hidden), weight.dtype
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        scale = of_loss / ctx.rows
        to_weight = None if of_weight is None else (of_weight * scale).to(ctx.dtype)
        return of_hidden * scale.to(of_hidden.dtype), to_weight, None, None, None


# ---- the drafter with tokens of its own ----------------------------------------------------------------------


def train_other_vocab(
    target: Llama, target_tokenizer: Tokenizer, tokenizer: Tokenizer, samples: Samples, plan: Plan
) -> tuple[Llama, dict[str, Any], dict[str, Any]]:
    """Next-token cross-entropy on the text in its own tokens; without a teacher, since the target's distribution is
    over another vocabulary."""
    names = dict(bos_token_id=TURN_START, eos_token_id=TURN_END, pad_token_id=TURN_END)
    ids = {role: tokenizer.token_to_id(name) for role, name in names.items()}
    config = draft_config(tokenizer.get_vocab_size(), plan.layers, ids)
    model = fresh_model(config, plan.device)
    start_from_bytes(model, tokenizer, target, target_tokenizer)

    def predictions(batch: Batch) -> tuple[Tensor, Tensor]:
        return next_tokens(model, samples, batch, plan)

    figures = fit("draft-other-vocab", model, lambda batch: F.cross_entropy(*predictions(batch)), samples, plan)
    entropy = right = count = 0.0
    with torch.no_grad():
        for batch in held_out_batches(samples, plan):
            logits, following = predictions(batch)
            entropy += F.cross_entropy(logits, following, reduction="sum").item()
            right += (logits.argmax(-1) == following).sum().item()
            count += len(following)
    return model, config, figures | dict(held_out_cross_entropy=entropy / count, held_out_top1=right / count)


def start_from_bytes(model: Llama, tokenizer: Tokenizer, target: Llama, target_tokenizer: Tokenizer) -> None:
    """Each token starts as the mean of the target's embeddings, projected, of the tokens of its own bytes."""
    directions = main_directions(target.output)
    for token, name in sorted(token_bytes(tokenizer).items()):
        ids = target_tokenizer.encode(name.decode("utf-8", "ignore")).ids
        if ids:
            model.output.data[token] = directions[torch.tensor(ids, device=directions.device)].mean(0)
        else:
            model.output.data[token].normal_(std=START_STD)


# ---- all ----------------------------------------------------------------------------------------------------


def draft_config(vocab: int, layers: int, token_ids: dict[str, int | None]) -> dict[str, Any]:
    return llama_config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        **token_ids,
    )


def fresh_model(config: dict[str, Any], device: str) -> Llama:
    model = Llama(Shape.of(config)).to(device)
    set_at_random(model)
    return model


def set_at_random(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            # Smaller where a block adds to the residual stream.
            scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[1]))


def main_directions(embedding: Tensor) -> Tensor:
    """The target's embedding on its first principal directions: a far better start than noise, above all for rare
    tokens."""
    wide = embedding.float()
    _, vectors = torch.linalg.eigh(wide.T @ wide)
    narrow = wide @ vectors[:, -HIDDEN:]
    return narrow / narrow.std() * START_STD


def fit(
    name: str, model: nn.Module, loss_of: Callable[[Batch], Tensor], samples: Samples, plan: Plan
) -> dict[str, Any]:
    """AdamW for a time and not for a number of steps; the rate rises over 3% of it, then falls to zero as a cosine."""
    optimizer = optimizer_for(model, plan)
    started = time.time()
    num_tokens = steps = 0
    curve = []
    for epoch, batch in endless(samples, plan):
        used = (time.time() - started) / plan.seconds
        if used >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.peak_rate * min(1.0, used / 0.03 + 1e-3) * (0.5 + 0.5 * math.cos(math.pi * used))
        loss = loss_of(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps, num_tokens = steps + 1, num_tokens + batch.num_tokens
        if steps % plan.log_every == 0:
            curve.append((steps, round(loss.item(), 4)))
            spent = time.time() - started
            print(f"{name} step {steps}, epoch {epoch}, loss {loss.item():.4f}, {spent:.0f} s", flush=True)
    print(f"{name}: {steps} steps, {num_tokens / 1e6:.1f}M tokens with padding, {epoch} epochs", flush=True)
    return dict(steps=steps, tokens=num_tokens, full_epochs=epoch, curve=curve)


def optimizer_for(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """No weight decay on the embedding and on norms."""
    parameters = list(model.named_parameters())
    decayed = [weight for name, weight in parameters if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in parameters if weight.ndim != 2 or "embed" in name]
    groups = [dict(params=decayed, weight_decay=0.02), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.95), fused=decayed[0].is_cuda)


def endless(samples: Samples, plan: Plan) -> Iterator[tuple[int, Batch]]:
    rng, epoch = np.random.default_rng(1), 0
    while True:
        for batch in samples.batches(False, plan.batch_tokens, rng):
            yield epoch, batch
        epoch += 1


def held_out_batches(samples: Samples, plan: Plan) -> list[Batch]:
    return samples.batches(True, plan.batch_tokens, np.random.default_rng(0))[:BATCHES_HELD_OUT]


def run_commands(commands: dict[str, Callable[[argparse.Namespace], None]], options: argparse.Namespace) -> None:
    """Run the program's commands that `options.commands` names, and print how long each took."""
    for name in options.commands:
        started = time.time()
        commands[name](options)
        print(f"{name}: {time.time() - started:.0f} s", flush=True)
