"""Bias, bad words and min-tokens as logit edits of one kind."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.support.fakes import HostBackend
from vllm_gaudi_spec.records import Request
from vllm_gaudi_spec.sampling.logit_edits import LogitEdits


def request(row: int, **params: object) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(req_id="a", params=sampling, seed_words=(0, 0), prompt=[1], row=row)


def gathered(edits: LogitEdits, row: int) -> list[np.ndarray]:
    return [tensor[0].numpy() for tensor in edits.gather(np.array([row]), HostBackend())]  # type: ignore[arg-type]


def test_no_logit_edits() -> None:
    assert not LogitEdits(2, num_edits=64, prefix_len=8).admit(request(0))


def test_each_kind() -> None:
    edits = LogitEdits(2, num_edits=64, prefix_len=8)
    asked = request(1, logit_bias={3: 1.5}, min_tokens=4, stop_token_ids=[9, 8])
    asked.params._bad_words_token_ids = [[5], [6, 7]]
    assert edits.admit(asked)
    token, bias, until, prefix = gathered(edits, 1)
    assert token[:5].tolist() == [3, 5, 7, 8, 9]
    assert bias[:5].tolist() == [1.5, -np.inf, -np.inf, -np.inf, -np.inf]
    assert (until[:3] > 10**9).all()
    assert until[3:5].tolist() == [4, 4]
    assert prefix[1].tolist() == [-1] * 8
    assert prefix[2].tolist() == [-1] * 7 + [6]
    assert not bias[5:].any()


def test_a_row_forgets_its_last_request() -> None:
    edits = LogitEdits(2, num_edits=64, prefix_len=8)
    edits.admit(request(0, logit_bias={3: 1.5}))
    edits.admit(request(0))
    assert not gathered(edits, 0)[1].any()


def test_min_tokens_yields_to_a_grammar() -> None:
    edits = LogitEdits(2, num_edits=4, prefix_len=1)
    grammar = StructuredOutputsParams(choice=["a"])
    edits.admit(request(0, min_tokens=4, stop_token_ids=[9], structured_outputs=grammar))
    assert gathered(edits, 0)[2][0] == -4


def test_a_long_bad_word_leaves_the_usual_shape() -> None:
    edits = LogitEdits(2, num_edits=2, prefix_len=1)
    stays, long = request(1), request(0)
    stays.params._bad_words_token_ids, long.params._bad_words_token_ids = [[6, 7]], [[1, 2, 3, 4]]
    edits.admit(stays)
    edits.admit(long)
    assert edits.shape == (2, 4)
    edits.admit(request(0))
    assert edits.shape == (2, 1)
    assert gathered(edits, 1)[3][0].tolist() == [6]


def test_a_long_bad_word_ends_with_its_request() -> None:
    edits = LogitEdits(2, num_edits=2, prefix_len=1)
    long, stays = request(0), request(1)
    long.params._bad_words_token_ids, stays.params._bad_words_token_ids = [[1, 2, 3, 4]], [[6, 7]]
    edits.admit(long)
    edits.admit(stays)
    edits.forget([0])
    assert edits.shape == (2, 1)
    assert gathered(edits, 1)[3][0].tolist() == [6]


@pytest.mark.parametrize("row", [0, 1])
def test_growing_keeps_what_others_wrote(row: int) -> None:
    edits = LogitEdits(2, num_edits=2, prefix_len=1)
    first = request(0, logit_bias={3: 1.5})
    first.params._bad_words_token_ids = [[6, 7]]
    edits.admit(first)
    second = request(1, logit_bias=dict.fromkeys(range(5), 1.0))
    second.params._bad_words_token_ids = [[1, 2, 3, 4]]
    edits.admit(second)
    token, _, _, prefix = gathered(edits, row)
    assert token[:2].tolist() == ([3, 7] if row == 0 else [0, 1])
    assert prefix.shape == (8, 4)
    assert prefix[1 if row == 0 else 5].tolist() == ([-1, -1, -1, 6] if row == 0 else [-1, 1, 2, 3])
