"""Sampling is exact: over 20k seeds the first two tokens follow the distribution of transformers' logits."""

from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from vllm import SamplingParams

from tests.full_tests import tiny_models
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.reference import Reference
from tests.support.distributions import cells, p_value
from tests.support.marks import quick_and_slow

VOCAB, SEEDS = 50, 20_000
PROMPT = [7, 3, 31, 12, 44]
SETTINGS: list[dict[str, Any]] = [
    dict(temperature=0.8, top_k=14, top_p=0.9, min_p=0.1),
    dict(temperature=1.0),
    dict(temperature=1.4, top_p=0.8),
    dict(temperature=0.7, top_k=8, min_p=0.15),
]
# All settings together may reject a correct sampler once in a thousand runs of the whole family.
ALPHA = 1e-3 / len(SETTINGS)


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A vocabulary this small has room for neither bytes nor text, so the engine runs on token ids alone."""
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1)
    # Logits a little flatter than elsewhere: else most cells would be too rare to test.
    model = lambda: tiny_models.llama(**shape, initializer_range=0.18)  # noqa: E731
    return tiny_models.save(model, tmp_path_factory.mktemp("small"))


def expected_probs(model: str, setting: dict[str, Any]) -> np.ndarray:
    """Return P(first token, second token), [V, V]."""
    reference = Reference(model)
    first = token_probs(reference.next_logits(PROMPT).numpy(), **setting)
    second = [token_probs(reference.next_logits([*PROMPT, token]).numpy(), **setting) for token in range(VOCAB)]
    return first[:, None] * np.stack(second)


def sample_pairs(model: str, setting: dict[str, Any]) -> np.ndarray:
    """Return two tokens of each seed, [N, 2]."""
    plain = dict(max_tokens=2, ignore_eos=True, detokenize=False)
    params = [SamplingParams(seed=seed, **plain, **setting) for seed in range(SEEDS)]
    with engine(model, skip_tokenizer_init=True, max_num_seqs=256, max_model_len=64) as llm:
        return np.array(first_tokens(generate(llm, [PROMPT] * SEEDS, params)))


@pytest.mark.parametrize("setting", quick_and_slow(SETTINGS[:1], SETTINGS), ids=str)
def test_sampled_tokens_follow_the_distribution(setting: dict[str, Any], small_vocabulary: str) -> None:
    probs = expected_probs(small_vocabulary, setting)
    assert (probs * SEEDS >= 5).sum() > 30, "too few cells for a test"
    for name in setting:
        without = {key: value for key, value in setting.items() if key != name}
        changed = np.abs(expected_probs(small_vocabulary, without) - probs).sum()
        assert changed > 0.01 or without == {}, f"{name} makes no difference here"
    pairs = sample_pairs(small_vocabulary, setting)
    # Each token's own distribution as well: the pairs have many cells, which spreads thin what concerns one token.
    p_values = [p_value(cells(pairs, VOCAB), probs.ravel()), p_value(pairs[:, 0], probs.sum(axis=1))]
    assert min(p_values) > ALPHA / len(p_values), p_values


def token_probs(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """vLLM's order: temperature, min-p, top-k, top-p; each filter sees what the ones before it left."""
    scaled = logits.astype(np.float64) / temperature
    probs = softmax(scaled)
    probs = np.where(probs >= min_p * probs.max(), probs, 0)
    if top_k:
        probs = np.where(probs >= np.sort(probs)[-top_k], probs, 0)
    probs = probs / probs.sum()
    # The smallest set of likeliest tokens that holds at least top_p of the mass.
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    return probs / probs.sum()
