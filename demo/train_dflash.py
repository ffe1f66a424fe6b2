"""Train `tiny/dflash`, a DFlash drafter for `tiny/target`, with the library speculators; README.md has the results.

The target writes the text. Needs speculators, of which release 0.9.0 was used, torch, transformers and tokenizers, and
no GPU. Run from the folder above `demo`, since the checkpoint names its target. The defaults are the values used.

    python demo/train_dflash.py
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama
import numpy as np
import torch
from sampling import PAST_END
from speculators import DFlashDraftModel
from speculators.losses import resolve_loss_config
from tiny_text import END, LONGEST_TINY_PROMPT, as_question, questions_and_openings, sampled
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

BLOCK_SIZE = 8
LAYERS_READ = (1, 2, 3)
TEXTS_PER_STEP = 4


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, default=Path("demo/tiny/target"))
    add("--out", type=Path, default=Path("demo/tiny/dflash"))
    add("--num_chat", type=int, default=1600, help="chat prompts")
    add("--num_plain", type=int, default=500, help="openings of plain texts; the templates give some fewer")
    add("--max_new", type=int, default=224, help="tokens of a text")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.7, 1.0], help="of the texts")
    add("--seconds", type=float, default=360, help="processor time of training")
    add("--max_anchors", type=int, default=96, help="blocks per step")
    add("--peak_rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    return parser.parse_args()


def write_texts(options: argparse.Namespace) -> tuple[list[int], list[np.ndarray]]:
    """Return the lengths of the prompts, and each prompt with the target's continuation."""
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    chat, plain = questions_and_openings(options.num_chat, options.num_plain, options.seed)
    asked = [as_question(question) for question in chat] + plain
    prompts = [encoding.ids[:LONGEST_TINY_PROMPT] for encoding in tokenizer.encode_batch(asked)]
    rng = np.random.default_rng(options.seed)
    warmth, past_end = rng.choice(options.temperatures, len(prompts)), rng.random(len(prompts)) < PAST_END
    target = llama.load(options.target, "cpu", torch.float32)
    return [*map(len, prompts)], sampled(target, prompts, warmth, 512, options.max_new, END, past_end)


class Batches:
    """Texts one after another, with what the target makes of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._prompt_lengths, self._texts = write_texts(options)
        self._target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
        self._rng = np.random.default_rng(options.seed)
        counts = np.bincount(np.concatenate(self._texts), minlength=self._target.config.vocab_size)
        self.rarest = int(counts[1:].argmin()) + 1
        print(f"{len(self._texts)} texts of {counts.sum()} tokens", flush=True)

    def draw(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches without end, each of texts of similar lengths."""
        lengths = np.array([*map(len, self._texts)])
        while True:
            order = np.argsort(lengths + self._rng.random(len(lengths)))
            groups = np.array_split(order, len(order) // TEXTS_PER_STEP)
            for group in self._rng.permutation(len(groups)):
                yield self._make(groups[group])

    @torch.no_grad()
    def _make(self, members: np.ndarray) -> dict[str, Tensor]:
        lengths = torch.tensor([len(self._texts[i]) for i in members])
        positions = torch.arange(int(lengths.max())).expand(len(members), -1)
        is_real = positions < lengths[:, None]
        ids = torch.zeros(positions.shape, dtype=torch.long)
        ids[is_real] = torch.from_numpy(np.concatenate([self._texts[i] for i in members]).astype(np.int64))
        prompts = torch.tensor([max(self._prompt_lengths[i], BLOCK_SIZE) for i in members])
        last: list[Tensor] = []
        hook = self._target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        states = self._target(ids, output_hidden_states=True).hidden_states
        hook.remove()
        parts = dict(
            hidden_states=torch.cat([states[layer] for layer in LAYERS_READ], dim=-1),
            verifier_last_hidden_states=last[0],
            input_ids=ids,
            position_ids=positions,
            # Blocks of one text end in the prompt of the next, at the latest.
            loss_mask=(positions >= prompts[:, None]).long(),
            document_ids=torch.arange(len(members))[:, None].expand(-1, positions.shape[1]),
        )
        return {name: part[is_real][None] for name, part in parts.items()}


def make_drafter(options: argparse.Namespace, mask_token: int) -> DFlashDraftModel:
    layers = Qwen3Config(
        vocab_size=1024,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        initializer_range=0.06,
    )
    return DFlashDraftModel.from_training_args(
        layers,
        draft_vocab_size=layers.vocab_size,
        block_size=BLOCK_SIZE,
        target_layer_ids=[*LAYERS_READ],
        mask_token_id=mask_token,
        verifier_name_or_path=str(options.target),
        draft_attn_impl="eager",
    )


def train(options: argparse.Namespace, drafter: DFlashDraftModel, batches: Batches) -> None:
    settings: dict[str, Any] = dict(loss_config=resolve_loss_config("kl_div", "eager"), max_anchors=options.max_anchors)
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.01)
    started, step, lengths = time.process_time(), 0, []
    for batch in batches.draw():
        done = (time.process_time() - started) / options.seconds
        if done >= 1:
            break
        rate = options.peak_rate * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        _, loss, metrics = drafter(**batch, **settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        lengths.append(float(metrics["eal_sum"] / metrics["eal_total"]))
        if step % 100 == 0:
            print(f"{done:.0%}, step {step}: tokens per block {np.mean(lengths[-100:]):.2f}", flush=True)
    print(f"{step} steps", flush=True)


def save(folder: Path, drafter: DFlashDraftModel) -> None:
    """Save the drafter in the library's format, without the copy of its code that the library adds."""
    drafter.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    batches = Batches(options)
    drafter = make_drafter(options, batches.rarest)
    print(f"{sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)} parameters", flush=True)
    train(options, drafter, batches)
    save(options.out, drafter)


if __name__ == "__main__":
    main()
