"""The standard rule compared with manual computation. See test_exact_rules.py for exactness."""

from tests.support import distributions
from tests.support.distributions import ALPHA, random_table, write
from vllm_gaudi_spec.sampling.rules import standard


def test_position_keyed_noise_is_exact() -> None:
    """The next step may reuse the noise of rejected drafts, which nothing emitted depends on."""
    target, drafter = random_table(3, 2, seed=1), random_table(3, 2, seed=2)
    texts, _ = write(
        standard.verify, target, drafter, num_positions=2, steps=2, length=6, rows=200_000, draft_starts=False
    )
    p_values = distributions.p_values(texts, target)
    assert min(p_values) > ALPHA, p_values
