"""How much of what a drafter drafts is accepted: plain speculative decoding in batches, without an engine."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llama import Attend, Llama, Shape
from other_tokenizer import token_bytes
from tokenizers import Tokenizer
from torch import Tensor
from training_prompts import TEXT_END

END_OF_TURN = 2


class Drafter:
    def start(self, ids: Tensor, lengths: Tensor, streams: list[Tensor]) -> None:
        """New texts: ids [B, L], of which the first lengths[b] are real; the buffer is as wide as it will ever be.
        `streams` is what the target made of them, from position 0 on."""
        raise NotImplementedError

    def see(self, positions: Tensor, streams: list[Tensor]) -> None:
        """What the target has made of the tokens at positions [B, T] since, drafts included; most ignore it."""

    def propose(self, ids: Tensor, lengths: Tensor, k: int, temperature: float) -> tuple[Tensor, list[Tensor]]:
        """k tokens of the target [B, k], and at temperatures above 0 the distribution of each, k times [B, V]."""
        raise NotImplementedError


@dataclass
class Outcome:
    steps: int
    per_position: list[float]
    """The share of the target's steps in which at least 1, 2, ... k drafts were accepted."""
    tokens_per_step: float
    ids: Tensor
    lengths: Tensor

    def figures(self) -> dict[str, Any]:
        return dict(steps=self.steps, per_position=self.per_position, tokens_per_step=self.tokens_per_step)


@torch.no_grad()
def decode(
    target: Llama,
    drafter: Drafter | None,
    prompts: list[list[int]],
    k: int,
    temperature: float,
    max_new: int,
    end: int = END_OF_TURN,
) -> Outcome:
    """Up to `max_new` tokens of every prompt, the last step's in full, and none after the end token; without a drafter
    the target decodes alone."""
    device, num_rows = target.output.device, len(prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(prompt_lengths.max())
    ids = torch.zeros(num_rows, longest + max_new + 2 * k + 4, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    cache, rows = Cache(target.shape, ids.shape, target.output), torch.arange(num_rows, device=device)
    positions = torch.arange(longest, device=device).expand(num_rows, -1)
    streams = target.streams(ids[:, :longest], positions, cache.attend(positions, longest))
    ids[rows, prompt_lengths], _ = pick(streams[-1][rows, prompt_lengths - 1] @ target.output.T, temperature)
    active = ids[rows, prompt_lengths] != end
    lengths = prompt_lengths + 1
    if drafter:
        drafter.start(ids, lengths, streams)
    steps = emitted = 0
    hits = torch.zeros(k, dtype=torch.long, device=device)
    nothing = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
    span = torch.arange(k + 1, device=device)
    while bool(active.any()):
        drafts, draft_probs = drafter.propose(ids, lengths, k, temperature) if drafter else (nothing, [])
        fed = torch.cat([ids.gather(1, (lengths - 1)[:, None]), drafts], 1)
        positions = (lengths - 1)[:, None] + span
        top = min(ids.shape[1], int(lengths.max()) + k)
        streams = target.streams(fed, positions, cache.attend(positions, top))
        if drafter:
            drafter.see(positions, streams)
        logits = streams[-1] @ target.output.T
        if temperature == 0:
            new, accepted = verify_greedy(logits, drafts)
        else:
            new, accepted = verify_sampled(logits / temperature, drafts, draft_probs)
        is_output = (span <= accepted[:, None]) & active[:, None]
        scratch = ids.shape[1] - 1  # a column that is never reached takes what is not kept
        ids.scatter_(1, torch.where(is_output, lengths[:, None] + span, scratch), new)
        steps += int(active.sum())
        emitted += int(is_output.sum())
        hits += ((accepted[:, None] > span[:k]) & active[:, None]).sum(0)
        lengths = torch.where(active, lengths + accepted + 1, lengths)
        ended = ((new == end) & is_output).any(1)
        active = active & ~ended & (lengths - prompt_lengths < max_new)
    return Outcome(steps, [round(hit / steps, 4) for hit in hits.tolist()], round(emitted / steps, 4), ids, lengths)


def verify_greedy(logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, k+1] and how many drafts were accepted [B]; the token after these is the target's own."""
    best = logits.argmax(-1)
    return best, (best[:, :-1] == drafts).long().cumprod(1).sum(1)


def verify_sampled(logits: Tensor, drafts: Tensor, draft_probs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Accepts a draft with probability min(1, p/q); after them a sample of what q lacks of p, or of p when all were
    accepted. The text follows the target's distribution."""
    p, q, k = logits.softmax(-1), torch.stack(draft_probs, 1), drafts.shape[1]
    rows = torch.arange(len(p), device=p.device)
    of_draft = [probs.gather(2, drafts[..., None])[..., 0] for probs in (p[:, :k], q)]
    ratio = of_draft[0] / of_draft[1].clamp(min=1e-20)
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    p_there = p[rows, accepted]
    q_there = torch.where((accepted < k)[:, None], q[rows, accepted.clamp(max=k - 1)], 0.0)
    residual = (p_there - q_there).clamp(min=0)
    # Rounding may leave nothing where p and q are alike.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_there)
    new = F.pad(drafts, (0, 1))
    new[rows, accepted] = torch.multinomial(residual, 1)[:, 0]
    return new, accepted


def pick(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    """A token [B], and at temperatures above 0 its distribution [B, V]."""
    if temperature == 0:
        return logits.argmax(-1), None
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs, 1)[:, 0], probs


class Cache:
    """Keys and values in which every row has a length of its own: a call writes at its positions, and attends to all up
    to them. The KV of a rejected draft is written over before it is read."""

    def __init__(self, shape: Shape, size: torch.Size, like: Tensor) -> None:
        num_rows, length = size
        whole = (num_rows, shape.kv_heads, length, shape.head_dim)
        self.keys = [torch.zeros(whole, device=like.device, dtype=like.dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.rows = torch.arange(num_rows, device=like.device)[:, None]
        self.repeats = shape.heads // shape.kv_heads

    def attend(self, positions: Tensor, top: int) -> Attend:
        """For one forward call at `positions` [B, T], all below `top`."""
        seen = torch.arange(top, device=positions.device)
        mask = (seen <= positions[:, :, None])[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer][self.rows, :, positions] = k.transpose(1, 2)
            self.values[layer][self.rows, :, positions] = v.transpose(1, 2)
            both = (self.keys[layer], self.values[layer])
            keys, values = (stored[:, :, :top].repeat_interleave(self.repeats, 1) for stored in both)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

        return attend


# ---- drafters ------------------------------------------------------------------------------------------------


class SameVocabDrafter(Drafter):
    """Token by token, with a cache of its own."""

    def __init__(self, model: Llama) -> None:
        self.model = model

    def start(self, ids: Tensor, lengths: Tensor, streams: list[Tensor]) -> None:
        self.cache = Cache(self.model.shape, ids.shape, self.model.output)
        top = int(lengths.max())
        positions = torch.arange(top, device=ids.device).expand(len(ids), -1)
        self.model(ids[:, :top], positions, self.cache.attend(positions, top))

    def propose(self, ids: Tensor, lengths: Tensor, k: int, temperature: float) -> tuple[Tensor, list[Tensor]]:
        top = int(lengths.max()) + k
        # The last k + 2 tokens are fed again, since some of them may be new to the cache.
        positions = (lengths[:, None] - (k + 2) + torch.arange(k + 2, device=ids.device)).clamp(min=0)
        fed = ids.gather(1, positions)
        drafts, draft_probs = [], []
        for j in range(k):
            hidden = self.model(fed, positions, self.cache.attend(positions, top))[:, -1]
            token, probs = pick(hidden @ self.model.output.T, temperature)
            drafts.append(token)
            draft_probs += [probs] if probs is not None else []
            fed, positions = token[:, None], (lengths + j)[:, None]
        return torch.stack(drafts, 1), draft_probs


class OtherVocabDrafter(Drafter):
    """Drafts tokens whose bytes are a token of the target. What it reads is the target's text in its own tokens
    (`retokenize`), or every token of the target on its own, <|endoftext|> in place of those without a partner."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, target_tokenizer: Tokenizer, retokenize: bool) -> None:
        self.model, self.tokenizer, self.retokenize = model, tokenizer, retokenize
        self.target_bytes = token_bytes(target_tokenizer)
        device = model.output.device
        self.to_target = torch.full((model.shape.vocab,), -1, device=device)
        self.to_draft = torch.full((len(self.target_bytes),), tokenizer.token_to_id(TEXT_END), device=device)
        of_target = {name: token for token, name in self.target_bytes.items()}
        for token, name in token_bytes(tokenizer).items():
            if name in of_target:
                self.to_target[token], self.to_draft[of_target[name]] = of_target[name], token
        self.barred = torch.where(self.to_target < 0, float("-inf"), 0.0)

    def start(self, ids: Tensor, lengths: Tensor, streams: list[Tensor]) -> None:
        self.texts = [b""] * len(ids)
        self.read = [0] * len(ids)

    def propose(self, ids: Tensor, lengths: Tensor, k: int, temperature: float) -> tuple[Tensor, list[Tensor]]:
        context, lengths = self.retokenized(ids, lengths) if self.retokenize else (self.to_draft[ids], lengths)
        top = int(lengths.max())
        context = F.pad(context, (0, max(0, top + k - context.shape[1])))[:, : top + k].clone()
        rows, drafts, draft_probs = torch.arange(len(context), device=context.device), [], []
        for j in range(k):
            # The model is small: the whole context is simply run again.
            hidden = self.model(context[:, : top + j])[rows, lengths - 1 + j]
            token, probs = pick(hidden @ self.model.output.T + self.barred, temperature)
            context[rows, lengths + j] = token
            drafts.append(self.to_target[token])
            draft_probs += [self.in_target_tokens(probs)] if probs is not None else []
        return torch.stack(drafts, 1), draft_probs

    def in_target_tokens(self, probs: Tensor) -> Tensor:
        wide = torch.zeros(len(probs), len(self.target_bytes), device=probs.device)
        return wide.index_add_(1, self.to_target.clamp(min=0), probs)

    def retokenized(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        for row, (tokens, length) in enumerate(zip(ids.tolist(), lengths.tolist(), strict=True)):
            self.texts[row] += b"".join(self.target_bytes[token] for token in tokens[self.read[row] : length])
            self.read[row] = length
        encodings = self.tokenizer.encode_batch([text.decode("utf-8", "ignore") for text in self.texts])
        own_lengths = np.array([len(encoding.ids) for encoding in encodings])
        context = np.zeros((len(encodings), own_lengths.max()), np.int64)
        for row, encoding in enumerate(encodings):
            context[row, : len(encoding.ids)] = encoding.ids
        return torch.from_numpy(context).to(ids.device), torch.from_numpy(own_lengths).to(ids.device)
