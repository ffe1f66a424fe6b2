"""Faults of a drafter do not affect its requests, and are reported."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.drafting.test_drafting import VOCAB, Counts, K, on_one_rank, sampled, started
from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.drafting.choice import DraftProbs
from vllm_gaudi_spec.drafting.guard import mark_different, mark_unusable
from vllm_gaudi_spec.drafting.history import RequestHistory
from vllm_gaudi_spec.drafting.on_host import HostDrafting
from vllm_gaudi_spec.records import FAULTY, DraftRound, Drafts


def request(wanted: list[int]) -> Any:
    return SimpleNamespace(
        rows_B=torch.arange(len(wanted)),
        num_drafts=K,
        max_drafts_B=torch.tensor(wanted),
        row_operations=row_operations.TORCH,
    )


def drafted(tokens: list[list[int]], counts: list[int], sound: list[list[bool]] | None = None) -> Drafts:
    sound_BK = None if sound is None else torch.tensor(sound)
    return Drafts(torch.tensor(tokens).int(), torch.tensor(counts).int(), None, sound_BK)


def test_faulty_rows_lose_drafts_and_others_keep_theirs() -> None:
    """Logits that are not numbers count only for drafts made from them."""
    tokens = [[1, 2, 3], [1, VOCAB, 3], [1, 2, -7], [4, 5, 6], [7, 8, VOCAB], [1, 2, 3], [1, 2, 3]]
    sound = [[True] * 3] * 5 + [[True, False, True]] * 2
    checked = mark_unusable(drafted(tokens, [3, 3, 3, 4, 2, 3, 1], sound), request([3] * 6 + [1]), VOCAB)
    assert checked.num_drafts_B.tolist() == [3, FAULTY, FAULTY, FAULTY, 2, FAULTY, 1]
    assert checked.tokens_BK.tolist()[:5] == [[1, 2, 3], [1, VOCAB - 1, 3], [1, 2, 0], [4, 5, 6], [7, 8, VOCAB - 1]]
    assert checked.for_host.num_drafts_B.tolist() == [3, 0, 0, 0, 2, 0, 1]


def test_stored_probs_are_those_of_the_last_usable_drafts() -> None:
    """Another row, a faulty row, and drafts beyond those of a shorter round keep what was stored before."""
    speculation = SimpleNamespace(keeps_probs=True, num_drafts=3)
    stored = DraftProbs(speculation, 2, 4, torch.device("cpu"))

    def put(counts: list[int], value: float, first_row: int = 0) -> None:
        shape, rows_B = (len(counts), max(counts)), torch.arange(first_row, first_row + len(counts))
        stored.put(rows_B, Drafts(torch.zeros(shape).int(), torch.tensor(counts), torch.full((*shape, 4), value)))

    def found() -> list[list[float]]:
        probs_BKV = stored.gather(torch.tensor([0, 1]), 3)
        return probs_BKV[:, :, 0].tolist()

    put([3, 3], 0.5)
    put([2], 0.25, first_row=1)
    assert found() == [[0.5] * 3, [0.25, 0.25, 0.5]]
    put([3, FAULTY], torch.nan)
    assert found()[1] == [0.25, 0.25, 0.5]


def count_drafts_on_both(own: Drafts, other: Drafts) -> list[list[int]]:
    """Return the number of drafts of each row on both of two ranks with a whole drafter each."""
    sent: list[torch.Tensor] = []

    def all_gather(numbers: torch.Tensor, dim: int) -> torch.Tensor:
        assert (numbers.dtype, dim) == (torch.float32, 0), "what every device's ranks exchange"
        sent.append(numbers)
        return torch.cat([sent[0], sent[-1]]) if len(sent) > 1 else torch.cat([numbers, numbers])

    group: Any = SimpleNamespace(world_size=2, device_communicator=SimpleNamespace(all_gather=all_gather))
    mark_different(other, group)
    sent = sent[:1]
    first = mark_different(own, group)
    sent = [sent[1]]
    return [alike_drafts.num_drafts_B.tolist() for alike_drafts in (first, mark_different(other, group))]


def test_replicated_drafters_use_drafts_that_agree() -> None:
    own = drafted([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]], [3, 3, 3, 2, FAULTY])
    other = drafted([[1, 2, 3], [1, 2, 3], [1, 9, 3], [1, 2, 9], [4, 5, 6]], [3, FAULTY, 3, 2, FAULTY])
    assert count_drafts_on_both(own, other) == [[3, FAULTY, FAULTY, 2, FAULTY]] * 2


def test_replicated_drafters_need_equal_probs() -> None:
    """Otherwise one rank would accept what the other rejects."""
    probs = torch.full((3, K, VOCAB), 0.01)
    other = probs.clone()
    other[1, 2, 3] = torch.tensor(0.01).nextafter(torch.tensor(1.0))
    other[2] = torch.nan
    own = drafted([[1, 2, 3]] * 3, [3, 3, 3])._replace(probs_BKV=probs)
    assert count_drafts_on_both(own, own._replace(probs_BKV=other)) == [[3, FAULTY, FAULTY]] * 2


# --- drafters on the host ---

Ask = Callable[[list[Any]], Any]


class Odd(Counts):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask

    def propose(self, contexts: list[Any]) -> Any:
        return self.ask(contexts)


def after_step(
    ask: Ask, agree: Callable[[Any], bool] = on_one_rank, excluded: str = ""
) -> tuple[HostDrafting, Any, list[list[int]]]:
    requests, row_limits, names = started()
    drafting = HostDrafting(Odd(ask), RequestHistory(row_limits, requests, K), VOCAB, agree)
    drafting.apply(requests)
    drafting.update_drafter_state([], [requests.by_id[name] for name in excluded], disabled=False)
    done, _ = sampled(requests, names, [[12, 13], [26], [33]])
    drafting.propose_on_host(done, K)
    return drafting, requests, drafting.get_draft_token_ids(done).draft_token_ids


def raises(contexts: list[Any]) -> Any:
    raise ZeroDivisionError("a drafter's own mistake")


@pytest.mark.parametrize(
    "ask",
    [
        raises,
        lambda contexts: None,
        lambda contexts: [[1]],
        lambda contexts: [[1]] * 3,
        lambda contexts: [None] * 2,
        lambda contexts: [[VOCAB]] * 2,
        lambda contexts: [[1, -2]] * 2,
        lambda contexts: [[1.5]] * 2,
        lambda contexts: [[float("nan")]] * 2,
        lambda contexts: [["1"]] * 2,
        lambda contexts: [[[1], [2]]] * 2,
        lambda contexts: torch.ones(2, 2, 2).int(),
        lambda contexts: 5,
    ],
)
def test_invalid_round_is_a_fault_of_every_request(ask: Ask) -> None:
    drafting, requests, reported = after_step(ask)
    assert reported == [[], [], []]
    assert requests.num_drafts_R.tolist() == [0] * 5
    assert drafting.take_rounds() == [DraftRound(("a", "b"), worked=False)]
    assert drafting.take_rounds() == []


def test_invalid_row_does_not_affect_others() -> None:
    drafting, _, reported = after_step(lambda contexts: [[14, VOCAB], [27]])
    assert reported == [[], [27], []]
    assert drafting.take_rounds() == [DraftRound(("a",), worked=True)]


def test_excluded_row_is_not_requested() -> None:
    asked: list[str] = []
    after_step(lambda contexts: asked.extend(context.req_id for context in contexts), excluded="a")
    assert asked == ["b"]


def test_extra_tokens_are_ignored() -> None:
    """Some classes pad their rows to one length."""
    drafting, _, reported = after_step(
        lambda contexts: [[14] * context.max_drafts + [VOCAB, -3] for context in contexts]
    )
    assert [set(row) for row in reported] == [{14}, {14}, set()]
    assert drafting.take_rounds() == [DraftRound((), worked=True)]


@pytest.mark.parametrize(("ask", "told"), [(Counts().propose, {"a": [14, 15, 16], "b": [27, 28, 29]}), (raises, None)])
def test_ranks_with_different_drafts_use_none(ask: Ask, told: dict[str, list[int]] | None) -> None:
    """A rank whose drafter failed still answers the others."""
    asked: list[Any] = []
    drafting, requests, reported = after_step(ask, lambda drafts: bool(asked.append(drafts)))
    assert asked == [told]
    assert reported == [[], [], []]
    assert requests.num_drafts_R.tolist() == [0] * 5
    assert drafting.take_rounds() == [DraftRound(("a", "b"), worked=False)]
