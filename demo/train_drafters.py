"""Train the three demo drafters for SmolLM2-135M-Instruct by self-distillation; README.md beside it has the results.

No data set is needed: the text is sampled from the target. Needs torch, numpy, safetensors and tokenizers, and a large
GPU: with the default sizes sampling holds 55 GB of KV cache (--batch lowers that), training 38 GB of hidden states. The
defaults are the values used.

    target=$(python -m vllm_gaudi_spec.tools.demo_model)
    python demo/train_drafters.py sample    --target $target
    python demo/train_drafters.py tokenizer --target $target
    python demo/train_drafters.py train     --target $target
    python demo/train_drafters.py eval      --target $target
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import llama
import torch
from acceptance import Drafter, OtherVocabDrafter, Outcome, SameVocabDrafter, decode
from eagle import HeadDrafter, load_head, save_head, train_eagle
from llama import Llama
from other_tokenizer import make_tokenizer
from sampling import LONGEST_PROMPT, sample
from tokenizers import Tokenizer
from training import Plan, Samples, target_states, train_other_vocab, train_same_vocab
from training_prompts import FIXED_OPENINGS, OUT_OF_TEMPLATE, as_chat

SAME, OTHER, EAGLE = "draft-same-vocab", "draft-other-vocab", "eagle-head"
CHAT_SHARE = 0.7


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=list(COMMANDS))
    add("--target", type=Path, required=True, help="folder with config.json, model.safetensors and tokenizer.json")
    add("--work", type=Path, default=Path("work"), help="the sampled text")
    add("--out", type=Path, default=Path("drafters"), help="the trained drafters")
    every = [SAME, EAGLE, OTHER]
    add("--drafters", nargs="+", choices=every, default=every, help="which to train or evaluate")
    add("--device", default="cuda")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("sample").add_argument
    add("--num_chat", type=int, default=30000, help="chat prompts")
    add("--num_plain", type=int, default=11000, help="openings of plain texts; the templates give some fewer")
    add("--batch", type=int, default=4096, help="texts at a time")
    add("--max_new", type=int, default=512)
    add("--sample_seconds", type=float, default=330, help="start no further batch past this")
    add = parser.add_argument_group("tokenizer").add_argument
    add("--vocab_size", type=int, default=16384)
    add("--tokenizer_texts", type=int, default=40000)
    add = parser.add_argument_group("train").add_argument
    add("--layers", type=int, default=4)
    add("--batch_tokens", type=int, default=16384)
    add("--peak_rate", type=float, default=2e-3)
    add("--eagle_rate", type=float, default=1e-3, help="peak rate of the EAGLE head")
    add("--eagle_steps", type=int, default=4, help="unrolled steps of the EAGLE head")
    add("--same_seconds", type=float, default=250)
    add("--eagle_seconds", type=float, default=300)
    add("--other_seconds", type=float, default=130)
    add("--log_every", type=int, default=250)
    add = parser.add_argument_group("eval").add_argument
    add("--eval_prompts", type=int, default=256, help="how many of the prompts held out")
    add("--eval_tokens", type=int, default=128)
    return parser.parse_args()


def run_sample(options: argparse.Namespace) -> None:
    sample(
        options.target,
        options.work,
        num_chat=options.num_chat,
        num_plain=options.num_plain,
        batch=options.batch,
        max_new=options.max_new,
        seconds=options.sample_seconds,
        seed=options.seed,
        device=options.device,
        dtype=training_dtype(options),
    )


def run_tokenizer(options: argparse.Namespace) -> None:
    make_tokenizer(options.target, options.work, options.out / OTHER, options.vocab_size, options.tokenizer_texts)


def run_train(options: argparse.Namespace) -> None:
    target = llama.load(options.target, options.device, training_dtype(options))
    if SAME in options.drafters or EAGLE in options.drafters:
        samples = Samples(options.work / "samples.npz", options.device)
        states = target_states(target, samples, training_dtype(options))
        if SAME in options.drafters:
            model, config, figures = train_same_vocab(target, samples, states, plan(options, options.same_seconds))
            save(options.out / SAME, model, config, figures)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                if (options.target / name).exists():
                    shutil.copy(options.target / name, options.out / SAME / name)
        if EAGLE in options.drafters:
            eagle_plan = replace(plan(options, options.eagle_seconds), peak_rate=options.eagle_rate)
            head, config, figures = train_eagle(target, samples, states, eagle_plan, options.eagle_steps)
            save_head(options.out / EAGLE, config, head)
            write_figures(options.out / EAGLE, figures)
        del samples, states
    if OTHER in options.drafters:
        samples = Samples(options.work / "other.npz", options.device)
        tokenizers = (tokenizer_of(options.target), tokenizer_of(options.out / OTHER))
        model, config, figures = train_other_vocab(target, *tokenizers, samples, plan(options, options.other_seconds))
        save(options.out / OTHER, model, config, figures)


def run_eval(options: argparse.Namespace) -> None:
    """In float32, every drafter on every set of prompts; the figures also go to acceptance.json."""
    torch.manual_seed(0)
    target = llama.load(options.target, options.device, torch.float32)
    figures = {}
    for set_name, prompts in prompt_sets(options).items():
        lengths = range(1, 6) if set_name == "held-out" else (3,)
        plain = decode(target, None, prompts, 0, 0.0, options.eval_tokens)
        for name, drafter in drafters(options, target):
            for temperature, k in [(t, k) for t in (0.0, 1.0) for k in lengths]:
                outcome = decode(target, drafter, prompts, k, temperature, options.eval_tokens)
                found = outcome.figures()
                if temperature == 0:
                    found["same_texts"] = same_texts(outcome, plain)
                figures[f"{name}, {set_name}, T={temperature:g}, k={k}"] = found
                print(f"{name}, {set_name}, T={temperature:g}, k={k}: {found}", flush=True)
    (options.out / "acceptance.json").write_text(json.dumps(figures, indent=1))


def prompt_sets(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    held_out = json.loads((options.work / "heldout.json").read_text())
    rng, num_chat = random.Random(0), int(options.eval_prompts * CHAT_SHARE)
    num_by_kind = {"chat": num_chat, "plain": options.eval_prompts - num_chat}
    chosen = [
        text for kind, n in num_by_kind.items() for text in rng.sample(held_out[kind], min(n, len(held_out[kind])))
    ]
    texts = {
        "held-out": chosen,
        "out-of-template": [as_chat(question) for question in OUT_OF_TEMPLATE],
        "fixed openings": FIXED_OPENINGS,
    }
    tokenizer = tokenizer_of(options.target)
    return {name: [e.ids[:LONGEST_PROMPT] for e in tokenizer.encode_batch(some)] for name, some in texts.items()}


def drafters(options: argparse.Namespace, target: Llama) -> Iterator[tuple[str, Drafter]]:
    if SAME in options.drafters:
        yield SAME, SameVocabDrafter(llama.load(options.out / SAME, options.device, torch.float32))
    if EAGLE in options.drafters:
        yield EAGLE, HeadDrafter(load_head(options.out / EAGLE, target.shape, options.device), target)
    if OTHER in options.drafters:
        model = llama.load(options.out / OTHER, options.device, torch.float32)
        tokenizers = (tokenizer_of(options.out / OTHER), tokenizer_of(options.target))
        yield f"{OTHER}, id by id", OtherVocabDrafter(model, *tokenizers, retokenize=False)
        yield f"{OTHER}, re-tokenized", OtherVocabDrafter(model, *tokenizers, retokenize=True)


def same_texts(outcome: Outcome, plain: Outcome) -> float:
    """The share of texts that are those of plain greedy decoding, which no drafter may change."""
    width = min(outcome.ids.shape[1], plain.ids.shape[1])
    ends = torch.minimum(outcome.lengths, plain.lengths)[:, None]
    past_end = torch.arange(width, device=ends.device) >= ends
    return ((outcome.ids[:, :width] == plain.ids[:, :width]) | past_end).all(1).float().mean().item()


def plan(options: argparse.Namespace, seconds: float) -> Plan:
    return Plan(options.layers, options.batch_tokens, options.peak_rate, seconds, options.log_every, options.device)


def save(folder: Path, model: Llama, config: dict, figures: dict) -> None:
    llama.save(folder, config, model)
    write_figures(folder, figures)


def write_figures(folder: Path, figures: dict) -> None:
    (folder / "training.json").write_text(json.dumps(figures))


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def training_dtype(options: argparse.Namespace) -> torch.dtype:
    return torch.float32 if options.device == "cpu" else torch.bfloat16


COMMANDS = {"sample": run_sample, "tokenizer": run_tokenizer, "train": run_train, "eval": run_eval}


def main() -> None:
    options = parse_options()
    # It plans anew for every length; flash attention does not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(options.seed)
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
