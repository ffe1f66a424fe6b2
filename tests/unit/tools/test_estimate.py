"""`gaudi-spec estimate`: what the constants predict, and what is printed."""

import pytest

from vllm_gaudi_spec.tools import estimate

CARDS = [pytest.param(card, id=name) for name, card in estimate.CARDS.items()]


@pytest.mark.parametrize("card", CARDS)
def test_no_gathering_attention_is_estimated_faster(card: estimate.Card) -> None:
    for step in estimate.list_steps(card):
        here = step[estimate.OURS.name]
        assert here <= step[estimate.BEFORE.name] * 1.001, step
        assert here <= step[estimate.FLATTENED.name] * 1.001, step


@pytest.mark.parametrize("card", CARDS)
def test_verification_of_three_drafts_costs_a_fifth_at_most(card: estimate.Card) -> None:
    steps = estimate.list_steps(card)
    plain = {key(step): step[estimate.OURS.name] for step in steps if step["drafts"] == 0}
    checked = [step for step in steps if step["drafts"] == 3 and step["rows"] <= 32]
    assert len(checked) == 12
    for step in checked:
        assert step[estimate.OURS.name] <= 1.2 * plain[key(step)], step


def key(step: dict[str, object]) -> tuple[object, ...]:
    return step["model"], step["rows"], step["context"]


def test_published_figures_are_predicted() -> None:
    """Within a third on a Gaudi 2. The constants take a Gaudi 3 to be up to 2.4 times as fast as Intel's figures."""
    figures = estimate.list_published()
    assert len(figures) >= 10
    for one in figures:
        ratio = one["predicted"] / one["tokens_per_second"]
        assert 0.75 < ratio < (1.33 if one["card"] == "gaudi2" else 2.4), one
