"""Train a tiny target and drafters of every kind for it; README.md beside it has the results.

No data set is needed: `draft-same-vocab` writes the text. Needs torch, numpy, safetensors and tokenizers, and a GPU.
The defaults are the values used.

    python demo/train_tiny.py text target samples drafters eval
"""

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

import llama
import numpy as np
import torch
import torch.nn.functional as F
from acceptance import Drafter, decode
from eagle import HeadDrafter
from llama import Llama
from sampling import PAST_END
from tiny_heads import Medusa, MedusaDrafter, train_head, train_medusa
from tiny_models import load_drafter, save_drafter, target_config
from tiny_text import (
    END,
    LONGEST_TINY_PROMPT,
    Text,
    as_question,
    encode,
    pack,
    sampled,
    train_tokenizer,
    write_texts,
)
from tokenizers import Tokenizer
from torch import Tensor
from training import Batch, Plan, Samples, fit, fresh_model, held_out_batches, next_tokens, run_commands
from training_prompts import OUT_OF_TEMPLATE

KINDS = ("eagle", "eagle3", "mtp", "medusa")
HERE = Path(__file__).parent


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("commands", nargs="+", choices=list(COMMANDS))
    add("--source", type=Path, default=HERE / "draft-same-vocab", help="the model that writes the text")
    add("--work", type=Path, default=Path("work"), help="the text")
    add("--out", type=Path, default=Path("tiny"), help="the trained models")
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, help="which drafters to train or evaluate")
    add("--device", default="cuda")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("text and samples").add_argument
    add("--num_chat", type=int, default=30000, help="chat prompts")
    add("--num_plain", type=int, default=11000, help="openings of plain texts; the templates give some fewer")
    add("--temperatures", type=float, nargs="+", default=[0.7, 0.85, 1.0], help="of the text")
    add("--own_temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.7, 1.0], help="of the target's own samples")
    add("--batch", type=int, default=4096, help="texts at a time")
    add("--max_new", type=int, default=320, help="tokens of a text, in those of its writer")
    add("--longest", type=int, default=640, help="tokens of a text, prompt and all, in those of the tiny target")
    add("--own_max_new", type=int, default=384)
    add = parser.add_argument_group("target and drafters").add_argument
    add("--batch_tokens", type=int, default=65536, help="of the target; drafters have half as many")
    add("--peak_rate", type=float, default=4e-3)
    add("--steps", type=int, default=4, help="unrolled steps of eagle, eagle3 and mtp")
    add("--target_seconds", type=float, default=140)
    add("--head_seconds", type=float, default=80, help="of eagle, eagle3 and mtp each")
    add("--medusa_seconds", type=float, default=30)
    add("--log_every", type=int, default=500)
    add = parser.add_argument_group("eval").add_argument
    add("--eval_prompts", type=int, default=256, help="how many of the prompts held out")
    add("--eval_tokens", type=int, default=128)
    add("--k", type=int, default=3)
    return parser.parse_args()


def make_text(options: argparse.Namespace) -> None:
    texts = write_texts(
        options.source,
        options.num_chat,
        options.num_plain,
        options.temperatures,
        options.batch,
        options.max_new,
        options.seed,
        options.device,
        torch.float32 if options.device == "cpu" else torch.bfloat16,
    )
    tokenizer = train_tokenizer(texts, options.out / "target")
    prompts, whole = encode(tokenizer, texts, options.longest)
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "text.json").write_text(json.dumps([asdict(text) for text in texts]))
    print(f"{sum(len(text.answer) for text in texts) / 1e6:.1f}M characters written", flush=True)
    pack(options.work / "text.npz", whole, prompts, np.array([text.held_out for text in texts]))


def train_target(options: argparse.Namespace) -> None:
    samples = Samples(options.work / "text.npz", options.device)
    plan = plan_of(options, options.batch_tokens, options.target_seconds)
    model = fresh_model(target_config(), options.device)

    def predictions(batch: Batch) -> tuple[Tensor, Tensor]:
        return next_tokens(model, samples, batch, plan)

    fit("target", model, lambda batch: F.cross_entropy(*predictions(batch)), samples, plan)
    with torch.no_grad():
        held_out = [F.cross_entropy(*predictions(batch)).item() for batch in held_out_batches(samples, plan)]
    print(f"target: {np.mean(held_out):.3f} nats per token of the texts held out", flush=True)
    llama.save(options.out / "target", target_config(), model)


def make_samples(options: argparse.Namespace) -> None:
    """The target's own texts, and those that it was trained on."""
    target, texts = load_target(options), read_texts(options)
    prompts, whole = encode(tokenizer_of(options), texts, options.longest)
    rng = np.random.default_rng(options.seed)
    warmth = rng.choice(options.own_temperatures, len(prompts))
    # Some run on past the end token, as texts in an engine that ignores it do.
    past_end = rng.random(len(prompts)) < PAST_END
    samples = sampled(target, prompts, warmth, options.batch, options.own_max_new, END, past_end)
    held_out = np.array([text.held_out for text in texts])
    pack(options.work / "own.npz", samples + whole, prompts * 2, np.concatenate([held_out, held_out]))


def train_drafters(options: argparse.Namespace) -> None:
    target = load_target(options)
    samples = Samples(options.work / "own.npz", options.device)
    size = options.batch_tokens // 2
    for kind in options.kinds:
        if kind == "medusa":
            head: torch.nn.Module = train_medusa(target, samples, plan_of(options, size, options.medusa_seconds))
        else:
            head = train_head(kind, target, samples, plan_of(options, size, options.head_seconds), options.steps)
        save_drafter(options.out / kind, kind, head, options.out / "target")


def evaluate(options: argparse.Namespace) -> None:
    """In float32, every drafter on every set of prompts; the figures also go to acceptance.json."""
    torch.manual_seed(0)
    target, figures = load_target(options), {}
    for set_name, prompts in prompt_sets(options).items():
        for kind in options.kinds:
            head = load_drafter(options.out / kind, kind, options.device)
            for temperature in (0.0, 1.0):
                drafter: Drafter = MedusaDrafter(head) if isinstance(head, Medusa) else HeadDrafter(head, target)
                outcome = decode(target, drafter, prompts, options.k, temperature, options.eval_tokens, END)
                name = f"{kind}, {set_name}, T={temperature:g}, k={options.k}"
                figures[name] = outcome.figures()
                print(f"{name}: {figures[name]}", flush=True)
    (options.out / "acceptance.json").write_text(json.dumps(figures, indent=1))


def prompt_sets(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    held_out = [text.prompt for text in read_texts(options) if text.held_out]
    held_out = random.Random(0).sample(held_out, min(options.eval_prompts, len(held_out)))
    sets = {"held-out": held_out, "out-of-template": [as_question(question) for question in OUT_OF_TEMPLATE]}
    tokenizer = tokenizer_of(options)
    return {name: [e.ids[:LONGEST_TINY_PROMPT] for e in tokenizer.encode_batch(some)] for name, some in sets.items()}


def read_texts(options: argparse.Namespace) -> list[Text]:
    return [Text(**text) for text in json.loads((options.work / "text.json").read_text())]


def load_target(options: argparse.Namespace) -> Llama:
    return llama.load(options.out / "target", options.device, torch.float32)


def tokenizer_of(options: argparse.Namespace) -> Tokenizer:
    return Tokenizer.from_file(str(options.out / "target" / "tokenizer.json"))


def plan_of(options: argparse.Namespace, batch_tokens: int, seconds: float) -> Plan:
    return Plan(1, batch_tokens, options.peak_rate, seconds, options.log_every, options.device)


COMMANDS = {
    "text": make_text,
    "target": train_target,
    "samples": make_samples,
    "drafters": train_drafters,
    "eval": evaluate,
}


def main() -> None:
    options = parse_options()
    # It plans anew for every length; flash attention does not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(options.seed)
    run_commands(COMMANDS, options)


if __name__ == "__main__":
    main()
