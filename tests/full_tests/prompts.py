"""Prompts for the full tests: readable ones for the demo model, random ids for the tiny ones."""

import random
from collections.abc import Sequence
from typing import Any

from tests.full_tests.tiny_models import VOCAB, byte_tokenizer

THINKING = dict(reasoning_start_str="{", reasoning_end_str="end}")
"""A reasoning config of the tiny models."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Q: What is the largest planet in the solar system?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 5, 8, 13,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\n# compute the mean of each row\n",
    "In 1969, the first humans",
    "Translate to French: Good morning, my friend.\n",
    "The three laws of motion are:\n1.",
    '{"name": "Ada", "age":',
    "Zürich, São Paulo, 東京 and",
    "SELECT name, count(*) FROM users",
    "To make bread you need flour, water, salt and yeast. First,",
    "x",
    "My favourite season is autumn, because the leaves turn red and gold, the air is clear, and in the evening " * 4,
]


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Uniform token ids without the two special ones."""
    rng = random.Random(seed)
    return [[rng.randrange(2, vocab) for _ in range(length)] for length in lengths]


def thinking_requests(
    params: Sequence[dict[str, Any]], lengths: Sequence[int]
) -> list[tuple[list[int], dict[str, Any]]]:
    """Return requests that think for 0 to 13 tokens, of `THINKING`'s markers."""
    start = byte_tokenizer().encode(THINKING["reasoning_start_str"], add_special_tokens=False)
    assert len(start) == 1, "after more tokens upstream's runners count differently"
    prompts = [prompt + start for prompt in random_prompts(lengths, VOCAB, seed=99)]
    return [
        (prompt, given | dict(thinking_token_budget=budget, ignore_eos=True))
        for given in params
        for prompt, budget in zip([*prompts, *prompts[:1]], (0, 3, 8, 13)[: 1 + len(prompts)], strict=True)
    ]
