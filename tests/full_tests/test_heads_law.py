"""Drafts that are drawn leave the law of what is sampled as it is: over 20k seeds the first three tokens, of which the
last two were drafted, follow the law that transformers' logits give."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.full_tests.engines import first_tokens, generate
from tests.full_tests.heads import METHODS, head, target, text
from tests.full_tests.reference import Reference
from tests.full_tests.sampling_law import chi_square, token_law
from tests.full_tests.speculation import accepted, speculating
from vllm_gaudi_spec.sampling.rules import table

SEEDS = 20_000
SETTING = dict(temperature=0.9, top_k=7, top_p=0.95)
RULES = [name for name, rule in table.RULES.items() if rule.needs_probs]
ALPHA = 1e-3 / (len(METHODS) * len(RULES))
PROMPT = text(12)


def expected_law() -> tuple[list[int], np.ndarray]:
    """Tokens that can be, and [S, S, S]: P(first, second, third) over these."""
    reference = Reference(target("eagle"))

    def behind(*tokens: int) -> np.ndarray:
        return token_law(reference.next_logits([*PROMPT, *tokens]).numpy(), **SETTING)

    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        law = {
            (*tokens, int(token)): share * following[token]
            for tokens, share in law.items()
            for following in [behind(*tokens)]
            for token in np.flatnonzero(following)
        }
    said = sorted({token for tokens in law for token in tokens})
    places = {token: place for place, token in enumerate(said)}
    spread = np.zeros((len(said),) * 3)
    for tokens, share in law.items():
        spread[tuple(places[token] for token in tokens)] = share
    return said, spread


@pytest.fixture(scope="module")
def law() -> tuple[list[int], np.ndarray]:
    return expected_law()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_first_three_tokens(method: str, rule: str, law: tuple[list[int], np.ndarray]) -> None:
    said, expected = law
    assert (expected * SEEDS >= 5).sum() > 50, "too few cells to say much"
    config = head(method, 2, draft_sample_method="probabilistic", rejection_sample_method=rule)
    # Two drafts behind the first token, and room for what follows them.
    params = [SamplingParams(seed=s, max_tokens=4, ignore_eos=True, detokenize=False, **SETTING) for s in range(SEEDS)]
    with speculating(target(method), config, max_num_seqs=256, max_model_len=64) as llm:
        outputs = first_tokens(generate(llm, [PROMPT] * SEEDS, params))
        # Otherwise the law would hold without the drafts having had a say.
        assert 0.1 * 2 * SEEDS < accepted(llm) < 0.9 * 2 * SEEDS
    counts = np.zeros_like(expected, dtype=np.int64)
    np.add.at(counts, tuple(np.searchsorted(said, np.array(outputs)[:, :3]).T), 1)
    p_values = [
        chi_square(counts, expected),
        chi_square(counts.sum(axis=2), expected.sum(axis=2)),
        *(chi_square(counts.sum(axis=axes), expected.sum(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1))),
    ]
    assert min(p_values) > ALPHA / len(p_values), p_values
