"""Train `tiny/peagle` and `tiny/dflash` with the library speculators; README.md has the results.

The target writes the text, and the library has the models and the losses. Needs speculators, of which release 0.9.0 was
used, torch, transformers, tokenizers and a GPU. Run from the folder above `demo`, since the checkpoints name their
target. The defaults are the values used; both trainings can run at the same time.

    python demo/train_heads.py texts train eval
"""

import argparse
import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import llama
import numpy as np
import torch
from acceptance import Drafter, decode, pick
from llama import Llama, Shape
from sampling import PAST_END, choose_held_out
from speculators import DFlashDraftModel, SpeculatorModel, SpeculatorModelConfig
from speculators.models.peagle import PEagleDraftModel
from tiny_heads import LAYERS_READ
from tiny_models import target_config
from tiny_text import END, LONGEST_TINY_PROMPT, VOCAB, as_question, pack, questions_and_openings, sampled
from tokenizers import Tokenizer
from torch import Tensor
from training import Batch, Plan, Samples, fit, run_commands
from training_prompts import OUT_OF_TEMPLATE
from transformers import LlamaConfig, Qwen3Config

NUM_DRAFTS = 8
ATTENTION = "sdpa"


@dataclass(frozen=True)
class Kind:
    """The model of a drafter, and the settings with which the library trains it."""

    model: type[SpeculatorModel]
    layers: LlamaConfig | Qwen3Config
    arguments: dict[str, Any]
    """The library's names for its training arguments."""
    seconds: float


def make_layers(
    config: type[LlamaConfig] | type[Qwen3Config], number: int, feed_forward: int
) -> LlamaConfig | Qwen3Config:
    shape = Shape.of(target_config())
    return config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=number,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=target_config()["max_position_embeddings"],
        rms_norm_eps=shape.eps,
        rope_parameters=dict(rope_type="default", rope_theta=shape.theta),
        initializer_range=0.06,
        bos_token_id=END,
        eos_token_id=END,
    )


KINDS = {
    "peagle": Kind(
        PEagleDraftModel, make_layers(LlamaConfig, 2, 256), dict(draft_vocab_size=VOCAB, num_depths=NUM_DRAFTS), 347
    ),
    "dflash": Kind(
        DFlashDraftModel,
        make_layers(Qwen3Config, 3, 384),
        dict(draft_vocab_size=VOCAB, block_size=1 + NUM_DRAFTS, max_anchors=768),
        347,
    ),
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("commands", nargs="+", choices=list(COMMANDS))
    add("--target", type=Path, default=Path("demo/tiny/target"))
    add("--work", type=Path, default=Path("work"), help="the texts")
    add("--out", type=Path, default=Path("demo/tiny"), help="the trained drafters")
    add("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="which drafters to train or evaluate")
    add("--device", default="cuda")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("texts").add_argument
    add("--num_chat", type=int, default=30000, help="chat prompts")
    add("--num_plain", type=int, default=11000, help="openings of plain texts; the templates give some fewer")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="every prompt at each")
    add("--batch", type=int, default=16384, help="texts at a time")
    add("--max_new", type=int, default=384, help="tokens of a text")
    add = parser.add_argument_group("train").add_argument
    add("--batch_tokens", type=int, default=4096)
    add("--peak_rate", type=float, default=3e-3)
    add("--seconds", type=float, help="of each training, in place of its own number")
    add("--log_every", type=int, default=500)
    add = parser.add_argument_group("eval").add_argument
    add("--eval_prompts", type=int, default=128, help="how many of the prompts held out")
    add("--eval_tokens", type=int, default=128)
    return parser.parse_args()


# ---- texts -------------------------------------------------------------------------------------------------------


def make_texts(options: argparse.Namespace) -> None:
    chat, plain = questions_and_openings(options.num_chat, options.num_plain, options.seed)
    prompts = encode(options, [as_question(question) for question in chat] + plain)
    rng = np.random.default_rng(options.seed)
    held_out = choose_held_out(len(chat), len(prompts), rng)
    target, texts = load_target(options), []
    for temperature in options.temperatures:
        # Some run on past the end token, as texts in an engine that ignores it do.
        past_end = rng.random(len(prompts)) < PAST_END
        warmth = np.full(len(prompts), temperature)
        texts += sampled(target, prompts, warmth, options.batch, options.max_new, END, past_end)
    options.work.mkdir(parents=True, exist_ok=True)
    copies = len(options.temperatures)
    pack(options.work / "heads.npz", texts, prompts * copies, np.tile(held_out, copies))


def encode(options: argparse.Namespace, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    return [encoding.ids[:LONGEST_TINY_PROMPT] for encoding in tokenizer.encode_batch(texts)]


def load_target(options: argparse.Namespace) -> Llama:
    return llama.load(options.target, options.device, torch.float32)


# ---- training ----------------------------------------------------------------------------------------------------


def train_heads(options: argparse.Namespace) -> None:
    target, samples = load_target(options), Samples(options.work / "heads.npz", options.device)
    for name in options.kinds:
        drafter = make_drafter(name, samples, options)
        seconds = options.seconds or KINDS[name].seconds
        plan = Plan(1, options.batch_tokens, options.peak_rate, seconds, options.log_every, options.device)
        fit(name, drafter, partial(compute_loss, name, drafter, target, plan), samples, plan)
        save(name, drafter, options)


def make_drafter(name: str, samples: Samples, options: argparse.Namespace) -> SpeculatorModel:
    kind, counts = KINDS[name], torch.bincount(samples.tokens, minlength=VOCAB).tolist()
    drafter = kind.model.from_training_args(
        kind.layers,
        t2d=None,
        d2t=None,
        target_layer_ids=[*LAYERS_READ],
        mask_token_id=min(range(1, VOCAB), key=counts.__getitem__),
        verifier_name_or_path=str(options.target),
        draft_attn_impl=ATTENTION,
        **kind.arguments,
    )
    drafter.norm.load_state_dict(drafter.verifier_norm.state_dict())
    # The checkpoint of a DFlash drafter that drafts all tokens has no output matrix of its own.
    drafter.lm_head.requires_grad_(name != "dflash")
    return drafter.to(options.device)


def compute_loss(name: str, drafter: SpeculatorModel, target: Llama, plan: Plan, batch: Batch) -> Tensor:
    arguments = dict(KINDS[name].arguments, loss_fn="kl_div", loss_implementation="eager")
    settings, _ = drafter.get_trainer_kwargs(**arguments)
    parts = make_inputs(name, target, batch)
    with plan.autocast():
        _, loss, _ = drafter(**parts, **settings)
    return loss


def make_inputs(name: str, target: Llama, batch: Batch) -> dict[str, Tensor]:
    """Return the library's inputs: the texts as one sequence, and the target's hidden states for them."""
    samples = batch.samples
    ids = samples.tokens[batch.flat_positions()].long()
    with torch.no_grad():
        streams = target.streams(ids)
    # Blocks of one text end in the prompt of the next, at the latest.
    prompt_lengths = np.maximum(samples.prompt_lengths[batch.members], 1 + NUM_DRAFTS)
    positions = torch.arange(batch.length, device=ids.device).expand(ids.shape)
    states = torch.cat([streams[layer] for layer in LAYERS_READ], -1)
    parts = dict(
        input_ids=ids,
        position_ids=positions,
        verifier_last_hidden_states=streams[-2],
        loss_mask=((positions >= batch.put(prompt_lengths)[:, None]) & batch.real()).long(),
        document_ids=torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape),
    )
    if name != "dflash":
        # A head reads each token with the state before it.
        states, parts = states[:, :-1], {part: values[:, 1:] for part, values in parts.items()}
    return {part: values.flatten(0, 1)[None] for part, values in dict(parts, hidden_states=states).items()}


def save(name: str, drafter: SpeculatorModel, options: argparse.Namespace) -> None:
    """Save a drafter without the copy of its code that the library adds."""
    folder = options.out / name
    drafter.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# ---- evaluation --------------------------------------------------------------------------------------------------


class ParallelDrafter(Drafter, ABC):
    """Drafts through the library's model, which reads the whole text again in every step."""

    def __init__(self, model: SpeculatorModel) -> None:
        self.model = model

    def start(self, ids: Tensor, lengths: Tensor, streams: list[Tensor]) -> None:
        self.rows = torch.arange(len(ids), device=ids.device)[:, None]
        self.states = torch.zeros(*ids.shape, len(LAYERS_READ) * streams[0].shape[-1], device=ids.device)
        self.see(torch.arange(streams[0].shape[1], device=ids.device).expand(len(ids), -1), streams)

    def see(self, positions: Tensor, streams: list[Tensor]) -> None:
        self.states[self.rows, positions] = torch.cat([streams[layer] for layer in LAYERS_READ], -1)

    def propose(self, ids: Tensor, lengths: Tensor, k: int, temperature: float) -> tuple[Tensor, list[Tensor]]:
        picked = [pick(logits, temperature) for logits in self.logits(ids, lengths, k).unbind(1)]
        return torch.stack([token for token, _ in picked], 1), [probs for _, probs in picked if probs is not None]

    @abstractmethod
    def logits(self, ids: Tensor, lengths: Tensor, k: int) -> Tensor:
        """Return the logits of k drafts, [B, k, V]."""


class PEagleDrafter(ParallelDrafter):
    def logits(self, ids: Tensor, lengths: Tensor, k: int) -> Tensor:
        model, top = self.model, int(lengths.max()) + k - 2
        positions = torch.arange(top, device=ids.device).expand(len(ids), -1)
        # It reads the token after each position with the state there, and then mask tokens.
        is_real = (positions < lengths[:, None] - 1)[..., None]
        mask = model.embed_tokens.weight[model.mask_token_id]
        embedded = torch.where(is_real, model.embed_tokens(ids[:, 1 : top + 1]), mask)
        states = torch.where(is_real, self.states[:, :top], model.mask_hidden)
        x = torch.cat([embedded, model.fc(states)], -1)
        turns = model.rotary_emb(x, positions)
        for layer in model.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=turns)
        drafted = lengths[:, None] - 2 + torch.arange(k, device=ids.device)
        return model.lm_head(model.norm(x[self.rows, drafted]))


class DFlashDrafter(ParallelDrafter):
    def logits(self, ids: Tensor, lengths: Tensor, k: int) -> Tensor:
        self.model.block_size = 1 + k
        # The library begins no block within one block of the end.
        positions = torch.arange(int(lengths.max()) + k + 2, device=ids.device).expand(len(ids), -1)
        ids, states = ids[:, : positions.shape[1]], self.states[:, : positions.shape[1]]
        parts = dict(
            hidden_states=states,
            verifier_last_hidden_states=states[..., : self.model.hidden_size],  # the loss is of no interest
            input_ids=ids,
            position_ids=positions,
            loss_mask=(positions == lengths[:, None] - 1).long(),
            document_ids=self.rows.expand(ids.shape),
        )
        flat = {part: values.flatten(0, 1)[None] for part, values in parts.items()}
        _, logits, *_ = self.model._backbone_forward(**flat, max_anchors=len(ids))
        return logits.view(len(ids), 1 + k, -1)[:, 1:]


def evaluate(options: argparse.Namespace) -> None:
    """Measure each drafter on each set of prompts, in float32, and write the figures to acceptance-KIND.json."""
    target = load_target(options)
    for name in options.kinds:
        drafter, figures = load(name, options), {}
        for set_name, prompts in list_prompt_sets(options).items():
            for temperature in (0.0, 1.0):
                for k in range(1, NUM_DRAFTS + 1):
                    torch.manual_seed(0)
                    outcome = decode(target, drafter, prompts, k, temperature, options.eval_tokens, END)
                    figures[f"{set_name}, T={temperature:g}, k={k}"] = outcome.figures()
                    print(f"{name}, {set_name}, T={temperature:g}, k={k}: {outcome.tokens_per_step}", flush=True)
                    (options.work / f"acceptance-{name}.json").write_text(json.dumps(figures, indent=1))


def load(name: str, options: argparse.Namespace) -> Drafter:
    folder = options.out / name
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = ATTENTION
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).to(options.device).eval()
    return PEagleDrafter(model) if name == "peagle" else DFlashDrafter(model)


def list_prompt_sets(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    samples = Samples(options.work / "heads.npz", "cpu")
    held_out = np.flatnonzero(samples.held_out)[: samples.held_out.sum() // len(options.temperatures)].tolist()
    chosen = random.Random(0).sample(held_out, min(options.eval_prompts, len(held_out)))
    starts, lengths = samples.offsets, samples.prompt_lengths
    return {
        "held-out": [samples.tokens[starts[i] : starts[i] + lengths[i]].tolist() for i in chosen],
        "out-of-template": encode(options, [as_question(question) for question in OUT_OF_TEMPLATE]),
    }


COMMANDS = {"texts": make_texts, "train": train_heads, "eval": evaluate}


def main() -> None:
    options = parse_options()
    # Compiled for every length anew, the library's models would start later than they are trained.
    torch.compiler.set_stance("force_eager")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(options.seed)
    run_commands(COMMANDS, options)


if __name__ == "__main__":
    main()
