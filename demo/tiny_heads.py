"""The tiny family's heads beside EAGLE-1: EAGLE-3, MiMo's multi-token prediction, Medusa; and the training of all."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from acceptance import Drafter, pick
from eagle import EagleHead, Head, distillation, following, size_of, unrolled
from llama import MLP, Attend, Attention, Block, Llama, RMSNorm, Shape, causal
from torch import Tensor, nn
from training import Batch, Plan, Samples, SoftCrossEntropy, fit, set_at_random

# Where in the target EAGLE-3 reads: in front of which layers, counted from 0.
LAYERS_READ = (1, 2, 3)
DRAFTED_TOKENS = 512
MEDUSA_HEADS = 4
LATER_HEADS = 0.8  # what each Medusa head counts, next to the one before it


# ---- EAGLE-3 -------------------------------------------------------------------------------------------------


class Eagle3Layer(nn.Module):
    """Attention reads the embedding and the state side by side, each through a norm of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn, self.mlp = Attention(shape, 2 * shape.hidden), MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        x = states + self.self_attn(both, cos, sin, lambda *qkv: attend(0, *qkv))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(Head):
    """Begins with three states out of the middle of the target; drafts the most frequent tokens only."""

    t2d: Tensor
    d2t: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(len(LAYERS_READ) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, DRAFTED_TOKENS, bias=False)
        # Which of the target's tokens it drafts, and how far each of its own is from the target's id.
        self.register_buffer("t2d", torch.zeros(shape.vocab, dtype=torch.bool))
        self.register_buffer("d2t", torch.zeros(DRAFTED_TOKENS, dtype=torch.long))

    def read(self, streams: list[Tensor]) -> Tensor:
        return self.fc(torch.cat([streams[i] for i in LAYERS_READ], -1))

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor | None = None, attend: Attend = causal
    ) -> tuple[Tensor, Tensor]:
        x = self.midlayer(embedded, states, *self.turns(positions, embedded), attend)
        return self.norm(x), x

    def output(self, embedding: Tensor) -> Tensor:
        return self.lm_head.weight

    def drafted(self, embedding: Tensor) -> Tensor:
        return embedding[self.t2d]

    def widen(self, logits: Tensor) -> Tensor:
        wide = logits.new_full((*logits.shape[:-1], self.shape.vocab), float("-inf"))
        wide[..., self.t2d] = logits
        return wide

    def start_from(self, target: Llama, samples: Samples) -> None:
        counts = torch.bincount(samples.tokens.long(), minlength=self.shape.vocab)
        frequent = counts.topk(DRAFTED_TOKENS).indices.sort().values
        self.t2d[frequent] = True
        self.d2t.copy_(frequent - torch.arange(DRAFTED_TOKENS, device=frequent.device))
        self.lm_head.weight.data.copy_(target.output[frequent])
        self.norm.weight.data.copy_(target.norm.weight)
        print(f"eagle3: its tokens are {counts[frequent].sum() / counts.sum():.1%} of the text", flush=True)


# ---- multi-token prediction ------------------------------------------------------------------------------------


class MtpHead(Head):
    """Begins with the target's state in front of its final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.token_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.block = Block(shape)
        self.final_layernorm = RMSNorm(shape.hidden, shape.eps)

    def read(self, streams: list[Tensor]) -> Tensor:
        return streams[-2]

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor | None = None, attend: Attend = causal
    ) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(embedded.shape[1], device=embedded.device).expand(embedded.shape[:2])
        # MiMo has no embedding at position 0.
        tokens = self.token_layernorm(embedded.masked_fill(positions[..., None] == 0, 0.0))
        x = self.input_proj(torch.cat([self.hidden_layernorm(states), tokens], -1))
        x = self.block(x, *self.turns(positions, x), lambda *qkv: attend(0, *qkv))
        made = self.final_layernorm(x)
        return made, made


# ---- Medusa ----------------------------------------------------------------------------------------------------


class MedusaBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.layers[0](x))


class Medusa(nn.Module):
    """Head i makes, out of the target's state at t alone, one that stands for the token t + 2 + i."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MedusaBlock(shape.hidden) for _ in range(MEDUSA_HEADS))
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, states: Tensor) -> list[Tensor]:
        return [block(states) for block in self.blocks]


class MedusaDrafter(Drafter):
    """Each head's best token, at any temperature, as engines have it: the distribution is that token alone."""

    def __init__(self, medusa: Medusa) -> None:
        self.medusa = medusa

    def start(self, ids: Tensor, lengths: Tensor, streams: list[Tensor]) -> None:
        weight = self.medusa.lm_head.weight
        self.rows = torch.arange(len(ids), device=ids.device)
        self.states = torch.zeros(*ids.shape, weight.shape[1], device=ids.device, dtype=weight.dtype)
        self.states[:, : streams[-1].shape[1]] = streams[-1]

    def see(self, positions: Tensor, streams: list[Tensor]) -> None:
        self.states[self.rows[:, None], positions] = streams[-1]

    def propose(self, ids: Tensor, lengths: Tensor, k: int, temperature: float) -> tuple[Tensor, list[Tensor]]:
        made = self.medusa(self.states[self.rows, lengths - 2])[:k]
        logits = [self.medusa.lm_head(state) for state in made]
        drafts = [pick(some, 0.0)[0] for some in logits]
        vocab = self.medusa.lm_head.out_features
        draft_probs = [F.one_hot(draft, vocab).to(logits[0].dtype) for draft in drafts] if temperature else []
        return torch.stack(drafts, 1), draft_probs


# ---- training ----------------------------------------------------------------------------------------------------


def fresh_head(kind: str, target: Llama, samples: Samples, device: str) -> Head:
    shape = replace(target.shape, layers=1)
    head: Head = {"eagle": EagleHead, "eagle3": Eagle3Head, "mtp": MtpHead}[kind](shape).to(device)
    set_at_random(head)
    if isinstance(head, Eagle3Head):
        head.start_from(target, samples)
    if isinstance(head, MtpHead):
        head.final_layernorm.weight.data.copy_(target.norm.weight)
    if isinstance(head, EagleHead):
        head.weigh_alike(size_of(target.output), state_size(target, samples))
    return head


@torch.no_grad()
def state_size(target: Llama, samples: Samples) -> float:
    return size_of(target(samples.tokens[None, :1024].long()))


def train_head(kind: str, target: Llama, samples: Samples, plan: Plan, steps: int) -> Head:
    """Distilled on the target's distribution over `steps` unrolled steps, and EAGLE-1 on its states as well. So small a
    target is simply run again for every batch."""
    head = fresh_head(kind, target, samples, plan.device)
    in_units_of = state_size(target, samples) if kind == "eagle" else None

    def loss(batch: Batch) -> Tensor:
        ids = samples.tokens[batch.flat_positions()].long()
        with torch.no_grad(), plan.autocast():
            streams = target.streams(ids)
        with plan.autocast():
            states = head.read(streams)
        goals, embedded = streams[-1], F.embedding(following(ids), target.output)
        rows = unrolled(head, embedded, states.to(goals.dtype), goals, batch, steps, plan)
        return distillation(head, rows, target.output, in_units_of)

    fit(kind, head, loss, samples, plan)
    return head


def train_medusa(target: Llama, samples: Samples, plan: Plan) -> Medusa:
    medusa = Medusa(target.shape).to(plan.device)
    set_at_random(medusa)
    medusa.lm_head.weight.data.copy_(target.output)

    def loss(batch: Batch) -> Tensor:
        ids = samples.tokens[batch.flat_positions()].long()
        with torch.no_grad(), plan.autocast():
            states = target(ids).flatten(0, 1)
        total = torch.zeros((), device=plan.device)
        # Its first draft is after the token that the target makes at the prompt's last.
        trained = batch.trained(-1)
        for i, block in enumerate(medusa.blocks):
            rows = trained[within(trained, i + 1, batch)]
            with plan.autocast():
                made = block(states[rows]).to(states.dtype)
            part = SoftCrossEntropy.apply(made, medusa.lm_head.weight, states[rows + i + 1], target.output)
            total = total + LATER_HEADS**i * part
        return total

    fit("medusa", medusa, loss, samples, plan)
    return medusa


def within(flat_positions: Tensor, ahead: int, batch: Batch) -> Tensor:
    """Which of these flat positions have `ahead` more after them in the same sample."""
    lengths = batch.put(batch.samples.lengths[batch.members])
    return flat_positions % batch.length + ahead < lengths[flat_positions // batch.length]
