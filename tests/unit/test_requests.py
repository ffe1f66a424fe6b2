"""The rows of running requests: who holds which, what it contains, and that nobody's trace stays behind."""

from __future__ import annotations

import pytest
import torch

from tests.unit.fakes import HostBackend, cached, new_request, step
from vllm_gaudi_spec.proposers.base import Drafts
from vllm_gaudi_spec.runner.requests import NO_ROW, Requests
from vllm_gaudi_spec.sample.noise import fold_seed
from vllm_gaudi_spec.sample.verdict import Verdict


@pytest.fixture
def requests() -> Requests:
    return Requests(HostBackend(), max_rows=3, max_len=64, block_sizes=[16], max_context=64, seed=0)  # type: ignore[arg-type]


def table(requests: Requests, req_id: str) -> list[int]:
    return requests.tables_np[0][requests.by_id[req_id].row].tolist()


def history(requests: Requests, req_id: str, length: int) -> list[int]:
    return requests.history_RM[requests.by_id[req_id].row, :length].tolist()


def test_admission_and_growth(requests: Requests) -> None:
    requests.apply(step({"a": 5}, new=[new_request("a", [7, 8, 9, 7, 5], [4])]))
    assert history(requests, "a", 6) == [7, 8, 9, 7, 5, 0]
    assert requests.by_id["a"].seed_words == fold_seed(1)
    requests.apply(step({"a": 1}, running=cached({"a": 16}, blocks={"a": [9]})))
    assert table(requests, "a") == [4, 9, 0, 0]
    assert requests.by_id["a"].num_computed == 16


def test_an_id_may_finish_and_come_back_in_one_step(requests: Requests) -> None:
    requests.apply(step({"a": 2}, new=[new_request("a", [1, 2, 3], [1, 2])]))
    requests.apply(step({"a": 1}, new=[new_request("a", [4], [3])], finished={"a"}))
    assert history(requests, "a", 4) == [4, 0, 0, 0], "nothing of the old request is left"
    assert table(requests, "a") == [3, 0, 0, 0]


@pytest.mark.parametrize("contract", ["V1", "V2"])
def test_preemption_replaces_blocks_and_keeps_the_noise(requests: Requests, contract: str) -> None:
    requests.apply(step({"a": 3}, new=[new_request("a", [1, 2, 3], [1])]))
    requests.by_id["a"].seed_words = (11, 12)  # as if it had come without a seed
    requests.apply(step({}, preempted={"a"}))
    assert requests.by_id["a"].row == NO_ROW
    known = [1, 2, 3, 40, 41]
    if contract == "V1":
        resumed = cached({"a": 2}, blocks={"a": [5, 6]}, resumed={"a": known})
        requests.apply(step({"a": 3}, running=resumed))
    else:
        again = new_request("a", [1, 2, 3], [5, 6], num_computed=2, prefill=known)
        requests.apply(step({"a": 3}, new=[again]))
    assert table(requests, "a") == [5, 6, 0, 0]
    assert history(requests, "a", 6) == [*known, 0]
    assert requests.by_id["a"].seed_words == (11, 12)
    assert requests.by_id["a"].outputs == [40, 41]


def test_a_preempted_request_may_be_aborted_before_the_next_step(requests: Requests) -> None:
    requests.apply(step({"a": 3}, new=[new_request("a", [1, 2, 3], [1])]))
    requests.apply(step({}, preempted={"a"}, finished={"a"}))
    assert "a" not in requests.by_id
    for name in "bcd":
        requests.apply(step({name: 1}, new=[new_request(name, [1], [1])]))


def test_the_next_turn_of_a_session_brings_a_longer_prompt_and_its_own_parameters(requests: Requests) -> None:
    from vllm.sampling_params import SamplingParams

    requests.apply(step({"a": 3}, new=[new_request("a", [1, 2, 3], [1])]))
    turn = new_request("a", [1, 2, 3, 9, 4], [1], num_computed=3, params=SamplingParams(seed=1, temperature=0.5))
    requests.apply(step({"a": 2}, new=[turn]))
    assert requests.by_id["a"].num_prompt == 5
    assert requests.by_id["a"].params.temperature == 0.5
    assert requests.by_id["a"].seed_words == fold_seed(1)


def test_rows_run_out_only_when_all_are_held(requests: Requests) -> None:
    for name in "abc":
        requests.apply(step({name: 1}, new=[new_request(name, [1], [1])]))
    assert {requests.by_id[name].row for name in "abc"} == {0, 1, 2}
    requests.apply(step({"d": 1}, new=[new_request("d", [9], [2])], finished={"b"}))
    assert len({requests.by_id[name].row for name in "acd"}) == 3


def test_without_a_seed_every_admission_draws_its_own(requests: Requests) -> None:
    from vllm.sampling_params import SamplingParams

    words = set()
    for _ in range(20):
        requests.apply(step({"a": 1}, new=[new_request("a", [1], [1], params=SamplingParams())], finished={"a"}))
        words.add(requests.by_id["a"].seed_words)
    assert len(words) == 20


def test_advance_writes_what_was_sampled_and_nothing_else(requests: Requests) -> None:
    requests.apply(step({"a": 3, "b": 2}, new=[new_request("a", [1, 2, 3], [1]), new_request("b", [4, 5], [2])]))
    row_a, row_b = requests.by_id["a"].row, requests.by_id["b"].row
    rows = torch.tensor([row_b, row_a, requests.pad_row])
    verdict = Verdict(
        tokens_BQ=torch.tensor([[50, 51, 52], [60, 61, 62], [70, 71, 72]], dtype=torch.int32),
        num_sampled_B=torch.tensor([2, 3, 1], dtype=torch.int32),
    )
    requests.advance(rows, torch.tensor([1, 2, 0], dtype=torch.int32), verdict)
    assert history(requests, "b", 6) == [4, 5, 50, 51, 0, 0]
    assert history(requests, "a", 7) == [1, 2, 3, 60, 61, 62, 0]
    assert requests.computed_R[row_b] == 3, "all but the newest token have KV"
    assert requests.computed_R[row_a] == 5
    assert requests.computed_R[requests.pad_row] == 0


def test_drafts_wait_behind_the_last_token_and_go_with_the_next(requests: Requests) -> None:
    requests.apply(step({"a": 3, "b": 2}, new=[new_request("a", [1, 2, 3], [1]), new_request("b", [4, 5], [2])]))
    row_a, row_b = requests.by_id["a"].row, requests.by_id["b"].row
    rows = torch.tensor([row_a, row_b, requests.pad_row])
    tokens = torch.tensor([[50, 51, 52], [60, 61, 62], [70, 71, 72]], dtype=torch.int32)
    lengths = torch.tensor([3, 2, 0], dtype=torch.int32)
    requests.put_drafts(rows, lengths, Drafts(tokens, torch.tensor([2, 0, 3], dtype=torch.int32)))
    assert history(requests, "a", 6) == [1, 2, 3, 50, 51, 0]
    assert history(requests, "b", 4) == [4, 5, 0, 0]
    assert requests.num_drafts_R[rows].tolist() == [2, 0, 0], "padding never has a draft"
    verdict = Verdict(torch.tensor([[80]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    requests.advance(rows[:1], torch.tensor([2], dtype=torch.int32), verdict)
    assert history(requests, "a", 4) == [1, 2, 3, 80]
    assert requests.num_drafts_R[row_a] == 0, "what stands behind the new token was drafted for another"


def test_a_row_is_handed_on_without_drafts(requests: Requests) -> None:
    requests.apply(step({"a": 1}, new=[new_request("a", [1], [1])]))
    row = torch.tensor([requests.by_id["a"].row])
    one = torch.tensor([1], dtype=torch.int32)
    requests.put_drafts(row, one, Drafts(torch.tensor([[9]], dtype=torch.int32), one))
    requests.apply(step({"b": 1}, new=[new_request("b", [1], [1])], finished={"a"}))
    assert requests.by_id["b"].row == row
    assert requests.num_drafts_R[row] == 0
    assert requests.ended == ["a"]
