"""Ranks of one model decide alike."""

from typing import Any

from vllm import LLM

from tests.full_tests.equality import first_difference


def histories(worker: Any) -> list[list[int]]:
    """Tokens of every row on a rank: prompts, what was sampled, and the newest drafts behind it."""
    return worker.model_runner.requests.history_RM[:-1].tolist()


def ranks_agree(llm: LLM, num_ranks: int) -> None:
    """No rank was told what another has sampled: all have decided alike, down to the drafts that were not accepted."""
    first, *others = llm.collective_rpc(histories)
    assert len(others) == num_ranks - 1
    assert any(map(any, first))
    for rank, other in enumerate(others, 1):
        parted = [
            (row, place, mine[place:][:4], theirs[place:][:4])
            for row, (mine, theirs) in enumerate(zip(first, other, strict=True))
            if (place := first_difference(mine, theirs)) is not None
        ]
        assert not parted, f"ranks 0 and {rank} part (row, position, tokens of each): {parted}"
