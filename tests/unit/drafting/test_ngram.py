"""N-gram drafts on the host and on the device, compared with a reference loop."""

import numpy as np
import pytest
import torch

from tests.support.reference.ngram import ngram_drafts
from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.attention.metadata import Blocks
from vllm_gaudi_spec.drafting.ngram import DeviceNgramProposer, NgramProposer
from vllm_gaudi_spec.records import Context, DraftRequest

SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (4, 9)]
NEVER = 999
"""Follows a row's end: a draft that contains it was read out of bounds."""


def on_host(tokens: list[int], sizes: tuple[int, int], max_drafts: int) -> list[int]:
    context = Context(
        req_id="a", tokens_np=np.array(tokens, dtype=np.int32), num_prompt=len(tokens), max_drafts=max_drafts
    )
    return list(NgramProposer(*sizes).propose([context])[0])


def random_texts(seed: int, count: int, longest: int) -> list[list[int]]:
    """Return texts over tiny alphabets, with loops, so that matches of all lengths and distances occur."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        length = int(rng.integers(1, longest + 1))
        text = rng.integers(0, rng.integers(1, 5), length)
        period = int(rng.integers(1, 8))
        if rng.random() < 0.3:
            text = np.resize(text[:period], length)
        texts.append(text.tolist())
    return texts


@pytest.mark.parametrize("sizes", SIZES)
def test_host_equals_reference_loop(sizes: tuple[int, int]) -> None:
    for max_drafts in (1, 4, 11):
        for text in random_texts(max_drafts, 200, 40):
            assert on_host(text, sizes, max_drafts) == ngram_drafts(text, *sizes, max_drafts), text


def test_host_reads_only_inside_view() -> None:
    """The array continues after the view."""
    array = np.array([4, 1, 2, 5, 1, 2, 5, 1, 2], dtype=np.int32)
    context = Context(req_id="a", tokens_np=array[1:6], num_prompt=2, max_drafts=4)
    assert list(NgramProposer(1, 3).propose([context])[0]) == [5, 1, 2, 5]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_device_equals_host(sizes: tuple[int, int], num_drafts: int) -> None:
    rng = np.random.default_rng(num_drafts)
    for seed in range(10):
        texts = random_texts(seed, 12, 24)
        width, pad_row = 24, len(texts)
        history = torch.full((pad_row + 1, width), NEVER, dtype=torch.int32)
        for row, text in enumerate(texts):
            history[row, : len(text)] = torch.tensor(text)
        rows = [*rng.permutation(pad_row).tolist(), pad_row, pad_row]
        wanted = [int(rng.integers(0, num_drafts + 1)) if row < pad_row else 0 for row in rows]
        lengths = [len(texts[row]) if row < pad_row else 0 for row in rows]
        drafts = DeviceNgramProposer(*sizes).propose(
            DraftRequest(
                rows_B=torch.tensor(rows),
                history_RM=history,
                lengths_B=torch.tensor(lengths, dtype=torch.int32),
                max_drafts_B=torch.tensor(wanted, dtype=torch.int32),
                num_drafts=num_drafts,
                blocks=Blocks((), ()),
                row_operations=row_operations.TORCH,
                choose=lambda *_: pytest.fail("n-grams have no logits"),
            )
        )
        assert drafts.tokens_BK.dtype == drafts.num_drafts_B.dtype == torch.int32
        assert drafts.tokens_BK.shape == (len(rows), num_drafts)
        assert not (drafts.tokens_BK == NEVER).any()
        for b, row in enumerate(rows):
            expected = on_host(texts[row], sizes, wanted[b]) if wanted[b] else []
            assert drafts.tokens_BK[b, : drafts.num_drafts_B[b]].tolist() == expected
