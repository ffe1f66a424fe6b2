"""An EAGLE head: one layer that goes on from the target's hidden states. What it computes, its training, drafting."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from acceptance import Cache, Drafter, pick
from llama import Attend, Block, Llama, Rotary, Shape, causal, llama_config, save_weights
from safetensors.torch import load_file
from torch import Tensor, nn
from training import Batch, Plan, Samples, SoftCrossEntropy, fit, held_out_batches, set_at_random

LATER_STEPS = 0.8  # what each unrolled step counts, next to the one before it
OF_THE_STATE = 0.2  # what being close to the target's state counts, next to its distribution
BATCHES_HELD_OUT = 30
START_GAIN = 0.7


class Head(Rotary):
    """Makes a state for position t out of the state before it and the token t + 1, so one step ahead of a model. It
    begins with a state of the target, and goes on with its own. Embedding and logits are the target's, unless a kind of
    head has its own."""

    def read(self, streams: list[Tensor]) -> Tensor:
        """The states to begin with, out of `Llama.streams` of the target."""
        return streams[-1]

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor | None = None, attend: Attend = causal
    ) -> tuple[Tensor, Tensor]:
        """What logits are made of, and the state to go on with, both [B, T, hidden]."""
        raise NotImplementedError

    def output(self, embedding: Tensor) -> Tensor:
        """What logits are made with, [V, hidden]."""
        return embedding

    def drafted(self, embedding: Tensor) -> Tensor:
        """The rows of the target's embedding that stand for the tokens it can draft."""
        return embedding

    def widen(self, logits: Tensor) -> Tensor:
        """Logits over the target's tokens."""
        return logits


class EagleHead(Head):
    """EAGLE-1, with neither a norm before nor one after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Block(shape, input_norm=False)])

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor | None = None, attend: Attend = causal
    ) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, states], -1))
        x = self.layers[0](x, *self.turns(positions, x), lambda *qkv: attend(0, *qkv))
        return x, x

    def weigh_alike(self, embedding_size: float, state_size: float) -> None:
        """Both halves of the input start with the same weight, whatever their sizes."""
        hidden = self.shape.hidden
        self.fc.weight.data[:, :hidden].normal_(std=START_GAIN / math.sqrt(hidden) / embedding_size)
        self.fc.weight.data[:, hidden:].normal_(std=START_GAIN / math.sqrt(hidden) / state_size)


def load_head(folder: Path, shape: Shape, device: str) -> EagleHead:
    head = EagleHead(replace(shape, layers=1))
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def save_head(folder: Path, config: dict[str, Any], head: nn.Module) -> None:
    save_weights(folder, config, head.state_dict())


# ---- training ------------------------------------------------------------------------------------------------


def train_eagle(
    target: Llama, samples: Samples, states: Tensor, plan: Plan, steps: int
) -> tuple[EagleHead, dict[str, Any], dict[str, Any]]:
    """Distilled on the target's whole distribution and its hidden states, over `steps` unrolled steps. Answers with the
    head, its config, and figures."""
    head = EagleHead(replace(target.shape, layers=1)).to(plan.device)
    set_at_random(head)
    embedding = target.output.to(states.dtype)
    state_size = size_of(states[:100000])
    head.weigh_alike(size_of(embedding), state_size)

    def steps_of(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        flat_positions = batch.flat_positions()
        ids, input_states = samples.tokens[flat_positions].long(), states[flat_positions]
        return unrolled(head, F.embedding(following(ids), embedding), input_states, input_states, batch, steps, plan)

    def loss(batch: Batch) -> Tensor:
        return distillation(head, steps_of(batch), embedding, state_size)

    figures = fit("eagle-head", head, loss, samples, plan)
    counted = np.zeros((3, steps))
    with torch.no_grad():
        for batch in held_out_batches(samples, plan)[:BATCHES_HELD_OUT]:
            for n, (mine, its) in enumerate(steps_of(batch)):
                q, p = ((rows.float() @ embedding.float().T).softmax(-1) for rows in (mine, its))
                agreed = (p.argmax(-1) == q.argmax(-1)).sum()
                counted[:, n] += [torch.minimum(p, q).sum().item(), agreed.item(), len(p)]
    overlap, agreement = (counted[:2] / counted[2]).tolist()
    return head, eagle_config(head.shape), figures | dict(held_out_overlap=overlap, held_out_agreement=agreement)


def size_of(rows: Tensor) -> float:
    return rows.float().pow(2).mean().sqrt().item()


def following(ids: Tensor) -> Tensor:
    """For every position of ids [B, T] the token after it; the last stands for its own."""
    return torch.cat([ids[:, 1:], ids[:, -1:]], 1)


def unrolled(
    head: Head, embedded: Tensor, states: Tensor, goals: Tensor, batch: Batch, steps: int, plan: Plan
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step, one row per position that counts: what the head makes, and the target's hidden state that it
    stands for. `states` are what the head begins with, `goals` the target's after its final norm; [B, T, hidden]."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    repeats = head.shape.heads // head.shape.kv_heads
    input_states = states
    for n in range(1, steps + 1):

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor, n: int = n) -> Tensor:
            keys.append(k.repeat_interleave(repeats, 1))
            values.append(v.repeat_interleave(repeats, 1))
            if n == 1:
                return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
            mask = unrolled_mask(batch.length, n, q.device)
            return F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)

        with plan.autocast():
            made, going_on = head(embedded, input_states, None, attend)
        # Position t stands for the target's state at t + 1; the first draft begins at the last token of the prompt.
        trained = batch.trained(n - 2)
        yield made.flatten(0, 1)[trained].to(goals.dtype), goals.flatten(0, 1)[trained + 1]
        input_states = torch.cat([states[:, :1], going_on[:, :-1].to(states.dtype)], 1)


@cache
def unrolled_mask(length: int, step: int, device: torch.device) -> Tensor:
    """What step `step` sees, [length, step * length]: of the first step's keys those up to where it began, and of each
    later step's the one on the way from there."""
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return torch.cat([back >= step - 1] + [back == step - m for m in range(2, step + 1)], 1)


def distillation(
    head: Head, steps: Iterator[tuple[Tensor, Tensor]], embedding: Tensor, state_size: float | None
) -> Tensor:
    """The loss of all steps; with `state_size` also that of the states, which is in units of it."""
    total = torch.zeros((), device=embedding.device)
    for n, (mine, its) in enumerate(steps):
        if len(mine):
            loss = SoftCrossEntropy.apply(mine, head.output(embedding), its, head.drafted(embedding))
            if state_size is not None:
                loss = loss + OF_THE_STATE * F.smooth_l1_loss(mine.float() / state_size, its.float() / state_size)
            total = total + LATER_STEPS**n * loss
    return total


def eagle_config(shape: Shape) -> dict[str, Any]:
    return llama_config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=shape.eps,
        rope_theta=shape.theta,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


# ---- drafting ------------------------------------------------------------------------------------------------


class HeadDrafter(Drafter):
    """With any head of this kind: over the target's states as far as these go, and then over its own."""

    def __init__(self, head: Head, target: Llama) -> None:
        self.head, self.embedding = head, target.output
        self.weight = head.output(target.output)

    def start(self, ids: Tensor, lengths: Tensor, streams: list[Tensor]) -> None:
        self.cache = Cache(self.head.shape, ids.shape, self.embedding)
        self.states = torch.zeros(*ids.shape, self.head.shape.hidden, device=ids.device, dtype=self.embedding.dtype)
        top = int(lengths.max()) - 1
        positions = torch.arange(top, device=ids.device).expand(len(ids), -1)
        self.see(positions, streams)
        self.run(ids[:, 1 : top + 1], self.states[:, :top], positions, top)

    def see(self, positions: Tensor, streams: list[Tensor]) -> None:
        self.states[self.cache.rows, positions] = self.head.read(streams)

    def run(self, ids: Tensor, states: Tensor, positions: Tensor, top: int) -> tuple[Tensor, Tensor]:
        return self.head(F.embedding(ids, self.embedding), states, positions, self.cache.attend(positions, top))

    def propose(self, ids: Tensor, lengths: Tensor, k: int, temperature: float) -> tuple[Tensor, list[Tensor]]:
        top = int(lengths.max()) + k
        # The last k + 2 positions are run again, since the target may have made new states of them.
        positions = (lengths[:, None] - 1 - (k + 2) + torch.arange(k + 2, device=ids.device)).clamp(min=0)
        fed, states = ids.gather(1, positions + 1), self.states[self.cache.rows, positions]
        drafts, draft_probs = [], []
        for j in range(k):
            made, going_on = self.run(fed, states, positions, top)
            token, probs = pick(self.head.widen(made[:, -1] @ self.weight.T), temperature)
            drafts.append(token)
            draft_probs += [probs] if probs is not None else []
            fed, states, positions = token[:, None], going_on[:, -1:], (lengths - 1 + j)[:, None]
        return torch.stack(drafts, 1), draft_probs
