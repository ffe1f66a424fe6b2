"""Sampled drafts leave the sampled distribution as it is: over 20k seeds the first three tokens, of which the last two
were drafted, follow the distribution of transformers' logits."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.full_tests.engines import first_tokens, generate
from tests.full_tests.heads import METHODS, head, target, text
from tests.full_tests.reference import Reference
from tests.full_tests.sampling_distribution import chi_square, token_probs
from tests.full_tests.speculation import accepted, speculating
from vllm_gaudi_spec import methods

SEEDS = 20_000
SETTING = dict(temperature=0.9, top_k=7, top_p=0.95)
RULES = [name for name, rule in methods.RULES.items() if rule.needs_probs]
DRAFTERS = (*METHODS, "dflash")
ALPHA = 1e-3 / (len(DRAFTERS) * len(RULES))
PROMPT = text(12)


def expected_probs() -> tuple[list[int], np.ndarray]:
    """Tokens that can be, and [S, S, S]: P(first, second, third) over these."""
    reference = Reference(target("eagle"))

    def probs_after(*tokens: int) -> np.ndarray:
        return token_probs(reference.next_logits([*PROMPT, *tokens]).numpy(), **SETTING)

    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        probs = {
            (*tokens, int(token)): share * following[token]
            for tokens, share in probs.items()
            for following in [probs_after(*tokens)]
            for token in np.flatnonzero(following)
        }
    vocabulary = sorted({token for tokens in probs for token in tokens})
    indices = {token: index for index, token in enumerate(vocabulary)}
    spread = np.zeros((len(vocabulary),) * 3)
    for tokens, share in probs.items():
        spread[tuple(indices[token] for token in tokens)] = share
    return vocabulary, spread


@pytest.fixture(scope="module")
def probs() -> tuple[list[int], np.ndarray]:
    return expected_probs()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", DRAFTERS)
def test_drafted_tokens_follow_the_target_distribution(
    method: str, rule: str, probs: tuple[list[int], np.ndarray]
) -> None:
    vocabulary, expected = probs
    assert (expected * SEEDS >= 5).sum() > 50, "too few cells for a test"
    config = head(method, 2, draft_sample_method="probabilistic", rejection_sample_method=rule)
    # Two drafts after the first token, and room for what follows them.
    params = [SamplingParams(seed=s, max_tokens=4, ignore_eos=True, detokenize=False, **SETTING) for s in range(SEEDS)]
    with speculating(target(method), config, max_num_seqs=256, max_model_len=64) as llm:
        outputs = first_tokens(generate(llm, [PROMPT] * SEEDS, params))
        # Otherwise the distribution would be right without any draft.
        assert 0.1 * 2 * SEEDS < accepted(llm) < 0.9 * 2 * SEEDS
    counts = np.zeros_like(expected, dtype=np.int64)
    np.add.at(counts, tuple(np.searchsorted(vocabulary, np.array(outputs)[:, :3]).T), 1)
    p_values = [
        chi_square(counts, expected),
        chi_square(counts.sum(axis=2), expected.sum(axis=2)),
        *(chi_square(counts.sum(axis=axes), expected.sum(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1))),
    ]
    assert min(p_values) > ALPHA / len(p_values), p_values
