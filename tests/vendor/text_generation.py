"""optimum-habana's text generation on the emulated Gaudi, with HPU graphs and a static cache, beside transformers.

python -P text_generation.py CHECKPOINT OUT

In optimum-habana's environment. Texts are greedy and in float32, so that they can be equal token by token.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

PROMPTS = [[5, 17, 300, 44, 17, 8], [9, 9, 250, 31], [400, 3, 77, 12, 90, 61, 2, 33, 150]]
NUM_TOKENS = 24
PAD = 0


def batch() -> dict[str, torch.Tensor]:
    """Padded on the left, as decoder-only models are served there."""
    length = max(map(len, PROMPTS))
    padding = [length - len(prompt) for prompt in PROMPTS]
    return {
        "input_ids": torch.tensor([[PAD] * pad + prompt for pad, prompt in zip(padding, PROMPTS, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (length - pad) for pad in padding]),
    }


def load(checkpoint: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.float32).eval()
    config = model.generation_config
    config.pad_token_id, config.eos_token_id = PAD, None
    config.max_new_tokens, config.do_sample, config.use_cache = NUM_TOKENS, False, True
    return model


def generate_on_host(checkpoint: str) -> list[list[int]]:
    """Before transformers is adapted to the card."""
    return load(checkpoint).generate(**batch())[:, batch()["input_ids"].shape[1] :].tolist()


def generate_on_card(checkpoint: str) -> tuple[list[list[int]], Any]:
    import habana_frameworks.torch.hpu as htorch
    from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

    adapt_transformers_to_gaudi()
    model = htorch.wrap_in_hpu_graph(load(checkpoint).to("hpu"))
    config = model.generation_config
    config.static_shapes, config.reuse_cache, config.bucket_size, config.ignore_eos = True, False, -1, True
    inputs = {name: tensor.to("hpu") for name, tensor in batch().items()}
    texts = []
    for _ in range(2):  # the second time every graph is there
        out = model.generate(**inputs, generation_config=config, lazy_mode=True, hpu_graphs=True)
        texts.append(out.cpu()[:, inputs["input_ids"].shape[1] :][:, :NUM_TOKENS].tolist())
    return texts[0], texts[1]


def main() -> None:
    import card_emulator

    checkpoint, out = sys.argv[1:]
    expected = generate_on_host(checkpoint)
    first, second = generate_on_card(checkpoint)
    card = card_emulator.device()
    counts = card.counters.total.as_dict()
    report = {"expected": expected, "first": first, "second": second, "counts": counts, "graphs": len(card.graphs)}
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
