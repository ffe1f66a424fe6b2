"""Text for training, sampled from the target itself: every prompt at several temperatures."""

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import llama
import numpy as np
import torch
import torch.nn.functional as F
from llama import Llama, rope_table, rotate
from tokenizers import Tokenizer
from torch import Tensor
from training_prompts import FIXED_OPENINGS, build_prompts

END_OF_TURN = 2  # the target's <|im_end|>
LONGEST_PROMPT = 96
HELD_OUT = 0.02
PAST_END = 0.12
TEMPERATURES = (0.0, 0.7, 1.0, 1.0)


@dataclass(frozen=True)
class Job:
    prompt: int
    temperature: float


def sample(
    target: Path,
    work: Path,
    *,
    num_chat: int,
    num_plain: int,
    batch: int,
    max_new: int,
    seconds: float,
    seed: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    """Writes samples.npz and heldout.json into `work`. Starts no further batch once the time is up: batches come in
    shuffled order, so what is left out is no kind of prompt in particular."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    model = llama.load(target, device, dtype)
    chat, plain = build_prompts(num_chat, num_plain, seed)
    texts = chat + plain
    prompts = [encoding.ids[:LONGEST_PROMPT] for encoding in tokenizer.encode_batch(texts)]
    rng = np.random.default_rng(seed)
    held_out = choose_held_out(len(chat), len(texts), rng)
    jobs = jobs_for(len(chat), len(texts))
    batches = batches_of(jobs, len(chat), batch, rng, seed)
    samples: list[np.ndarray] = []
    done: list[Job] = []
    started = time.time()
    for number, members in enumerate(batches):
        spent = time.time() - started
        if number and seconds - spent < spent / number:
            print("time is up; batches left out:", len(batches) - number)
            break
        mine = [jobs[j] for j in members]
        temperatures = torch.tensor([job.temperature for job in mine], device=device)
        # Some run on past the end token, as texts in an engine that ignores it do.
        past_end = torch.tensor(rng.random(len(mine)) < PAST_END, device=device)
        samples += generate(model, [prompts[job.prompt] for job in mine], temperatures, past_end, max_new)
        done += mine
        millions = sum(map(len, samples)) / 1e6
        print(f"batch {number + 1}/{len(batches)}: {millions:.2f}M tokens, {time.time() - started:.0f} s", flush=True)
    work.mkdir(parents=True, exist_ok=True)
    write_samples(work / "samples.npz", samples, done, prompts, held_out)
    held = [(i, texts[i]) for i in np.flatnonzero(held_out)]
    sets = {
        "chat": [text for i, text in held if i < len(chat)],
        "plain": [text for i, text in held if i >= len(chat)],
    }
    (work / "heldout.json").write_text(json.dumps(sets))


def choose_held_out(num_chat: int, num_texts: int, rng: np.random.Generator) -> np.ndarray:
    """Which prompts are kept from training, with all their samples; never the fixed openings."""
    held_out = np.zeros(num_texts, bool)
    held_out[rng.permutation(num_texts)[: int(HELD_OUT * num_texts)]] = True
    held_out[num_chat : num_chat + len(FIXED_OPENINGS)] = False
    return held_out


def jobs_for(num_chat: int, num_texts: int) -> list[Job]:
    """All prompts at all temperatures, and the fixed openings a few times more."""
    jobs = [Job(i, temperature) for i in range(num_texts) for temperature in TEMPERATURES]
    return jobs + [Job(num_chat + i, t) for i in range(len(FIXED_OPENINGS)) for t in (0.7, 1.0) * 4]


def batches_of(jobs: list[Job], num_chat: int, size: int, rng: np.random.Generator, seed: int) -> list[np.ndarray]:
    """Chat and plain prompts in batches of their own, because their lengths differ."""
    is_chat = np.array([job.prompt < num_chat for job in jobs])
    batches = []
    for kind in (True, False):
        members = rng.permutation(np.flatnonzero(is_chat == kind))
        batches += [members[i : i + size] for i in range(0, len(members), size)]
    random.Random(seed).shuffle(batches)
    return batches


def write_samples(
    file: Path, samples: list[np.ndarray], jobs: list[Job], prompts: list[list[int]], held_out: np.ndarray
) -> None:
    """All tokens in a row, sample i from offset i on; its prompt is its first `prompt_lengths[i]` tokens."""
    of_prompt = np.array([job.prompt for job in jobs], np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in samples])]).astype(np.int64)
    lengths = np.array([len(prompts[i]) for i in of_prompt], np.int32)
    tokens = np.concatenate(samples)
    np.savez(file, tokens=tokens, offsets=offsets, prompt_lengths=lengths, held_out=held_out[of_prompt])
    print(f"{len(samples)} samples, {len(tokens)} tokens, {len(tokens) - int(lengths.sum())} of them generated")


# ---- one batch -------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: Llama,
    prompts: list[list[int]],
    temperatures: Tensor,
    past_end: Tensor,
    max_new: int,
    finished_share: float = 0.985,
    end: int = END_OF_TURN,
) -> list[np.ndarray]:
    """Sampling without padding: every row starts at position 0, is fed its own prompt one token a step, and samples
    from then on. Ends when nearly all rows have, and cuts the others there."""
    device = temperatures.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest, shortest = int(lengths.max()), int(lengths.min())
    tokens = torch.full((len(prompts), longest + max_new + 1), end, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    decoder = OneTokenDecoder(model, len(prompts), longest + max_new)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    ends = lengths + max_new
    for at in range(longest + max_new):
        hidden = decoder(tokens[:, at], at)
        if at + 1 < shortest:
            continue  # every row is still inside its prompt
        chosen = choose(F.linear(hidden, model.output), temperatures)
        live = (at + 1 >= lengths) & ~done & (at + 1 < ends)
        tokens[:, at + 1] = torch.where(live, chosen, tokens[:, at + 1])
        stopped = live & (chosen == end) & ~past_end
        ends = torch.where(stopped, at + 2, ends)  # the end token is part of the sample
        done |= stopped | (at + 2 >= ends)
        # Reading the share waits for the device, so not at every step.
        if at % 16 == 0 and at > longest and done.float().mean() > finished_share:
            ends = ends.clamp(max=at + 2)
            break
    ends = ends.clamp(max=longest + max_new)
    rows = zip(tokens.cpu().numpy(), ends.tolist(), strict=True)
    return [row[:length].astype(np.uint16) for row, length in rows]


def choose(logits: Tensor, temperatures: Tensor) -> Tensor:
    """A sample of softmax(logits / temperature) by Gumbel's trick, the best token at temperature 0; [B, V] to [B]."""
    greedy = (temperatures == 0)[:, None]
    inverse = torch.where(greedy, 1.0, 1 / temperatures.clamp(min=1e-3)[:, None])
    scores = logits.float().mul_(inverse)
    noise = torch.empty_like(scores).exponential_().log_().masked_fill_(greedy, 0)
    return scores.sub_(noise).argmax(-1)


class OneTokenDecoder:
    """Runs one token of every row, all at the same position, against one static KV cache that holds exactly the
    positions so far: no mask and no padding. Projections of the same input are fused."""

    def __init__(self, model: Llama, rows: int, length: int) -> None:
        weight, shape = model.output, model.shape
        self.model, self.shape = model, shape
        size = (rows, shape.kv_heads, length, shape.head_dim)
        self.keys = [torch.empty(size, device=weight.device, dtype=weight.dtype) for _ in model.layers]
        self.values = [torch.empty_like(keys) for keys in self.keys]
        self.cos, self.sin = (table.to(weight.dtype) for table in rope_table(shape, length, weight.device))
        self.to_qkv, self.to_gate_up = [], []
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            self.to_qkv.append(torch.cat(qkv))
            self.to_gate_up.append(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))

    def __call__(self, ids: Tensor, at: int) -> Tensor:
        """ids [B] at position `at`; [B, hidden] after the final norm."""
        x = F.embedding(ids, self.model.output)
        for i, layer in enumerate(self.model.layers):
            x = x + layer.self_attn.o_proj(self.attention(i, layer.input_layernorm(x), at))
            gate, up = F.linear(layer.post_attention_layernorm(x), self.to_gate_up[i]).chunk(2, -1)
            x = x + layer.mlp.down_proj(F.silu(gate) * up)
        return self.model.norm(x)

    def attention(self, i: int, x: Tensor, at: int) -> Tensor:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = F.linear(x, self.to_qkv[i]).view(len(x), heads + 2 * kv_heads, self.shape.head_dim)
        qk = rotate(qkv[:, : heads + kv_heads], self.cos[at], self.sin[at])
        self.keys[i][:, :, at], self.values[i][:, :, at] = qk[:, heads:], qkv[:, heads + kv_heads :]
        seen = slice(0, at + 1)
        query, keys, values = qk[:, :heads, None], self.keys[i][:, :, seen], self.values[i][:, :, seen]
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True).reshape(len(x), -1)
