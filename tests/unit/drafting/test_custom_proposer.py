"""The arguments and results of a user's drafter."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_gaudi_spec.drafting.custom import CustomProposer
from vllm_gaudi_spec.records import Context


class Scripted:
    def __init__(self, vllm_config: Any) -> None:
        self.config = vllm_config
        self.answers: list[list[int]] = []
        self.asked: list[tuple[Any, ...]] = []

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        self.asked.append((sampled_token_ids, num_tokens_no_spec, token_ids_cpu))
        return self.answers


def build(name: str = "Scripted", width: int = 16) -> tuple[CustomProposer, Any]:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(model=f"{__name__}.{name}", num_speculative_tokens=4),
        model_config=SimpleNamespace(max_model_len=width),
    )
    proposer = CustomProposer(config)
    assert proposer._proposer.config is config
    return proposer, proposer._proposer


def context(req_id: str, tokens: list[int], num_prompt: int, max_drafts: int = 4) -> Context:
    return Context(
        req_id=req_id, tokens_np=np.array(tokens, dtype=np.int32), num_prompt=num_prompt, max_drafts=max_drafts
    )


def test_arrays_contain_only_rows_that_may_draft() -> None:
    proposer, user = build()
    user.answers = [[1], [2]]
    assert proposer.propose([context("a", [3, 4, 5], 2), context("b", [6, 7, 8, 9, 1], 2)]) == [[1], [2]]
    ((sampled, lengths, tokens),) = user.asked
    assert sampled == [[5], [8, 9, 1]]
    assert lengths.tolist() == [3, 5]
    assert tokens.shape == (2, 16)
    assert tokens.dtype == lengths.dtype == np.int32
    assert tokens[0].tolist() == [3, 4, 5] + [0] * 13
    assert tokens[1].tolist() == [6, 7, 8, 9, 1] + [0] * 11


def test_sampled_tokens_are_those_of_current_step() -> None:
    proposer, user = build()
    user.answers = [[]]
    for size in (3, 4, 7, 7):  # the last one: resumed after preemption
        proposer.propose([context("a", list(range(size)), 2)])
    proposer.forget(["a", "never seen"])
    proposer.propose([context("a", [5, 6, 7, 8], 2)])
    assert [asked[0] for asked in user.asked] == [[[2]], [[3]], [[4, 5, 6]], [[6]], [[7, 8]]]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [([1, -1, 3], [1]), ([1, -2, 3], [1, -2, 3]), ([-1], []), (np.array([1, 2]), [1, 2]), (None, None)],
)
def test_padding_is_stripped_from_answers(answer: Any, expected: Any) -> None:
    proposer, user = build()
    user.answers = [answer]
    (drafts,) = proposer.propose([context("a", [1, 2, 3], 2)])
    assert drafts == expected


def test_failed_drafter_gets_the_same_tokens_again() -> None:
    proposer, user = build()
    user.answers = [[]]
    proposer.propose([context("a", [1, 2, 3], 2)])
    user.answers = None
    with pytest.raises(TypeError):
        proposer.propose([context("a", [1, 2, 3, 4, 5], 2)])
    user.answers = [[]]
    proposer.propose([context("a", [1, 2, 3, 4, 5, 6], 2)])
    assert [asked[0] for asked in user.asked] == [[[3]], [[4, 5]], [[6]]]
