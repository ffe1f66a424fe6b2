"""Logit bias, bad words and min-tokens as logit edits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.sample.ops.bad_words import apply_bad_words

from tests.support.fakes import CapturingBackend, HostBackend
from vllm_gaudi_spec.config import MAX_BAD_WORD_TOKENS, MAX_LOGIT_EDITS
from vllm_gaudi_spec.device_rows import DeviceRows
from vllm_gaudi_spec.records import Request
from vllm_gaudi_spec.sampling.logit_edits import EditTables, LogitEdits, make_empty_rows
from vllm_gaudi_spec.sampling.logits import apply_logit_edits
from vllm_gaudi_spec.sampling.verify import gather_recent_outputs


def request(row: int, bad_words: list[list[int]] | None = None, **params: Any) -> Request:
    sampling = SamplingParams(**params)
    sampling._bad_words_token_ids = bad_words
    return Request(req_id="a", params=sampling, seed_words=(0, 0), prompt=[1], row=row)


class WrittenEdits(LogitEdits):
    """Writes what it returns into the tables, as `Sampling` does."""

    def __init__(self, backend: Any) -> None:
        self.rows = DeviceRows(backend, 4, *make_empty_rows())
        super().__init__(backend, 4, EditTables(*self.rows.tables))

    def admit(self, request: Request) -> Any:
        self.rows.set(request.row, *super().admit(request))


def gather(edits: WrittenEdits, *rows: int) -> EditTables:
    edits.rows.flush()
    return edits.gather(torch.tensor(rows), edits.get_sizes(np.array(rows)))


def logit_edits(has_fixed_shapes: bool = False) -> WrittenEdits:
    return WrittenEdits(CapturingBackend() if has_fixed_shapes else HostBackend())


@pytest.mark.parametrize("grammar", [None, StructuredOutputsParams(choice=["a"])])
def test_min_tokens_beyond_context_never_ends(grammar: StructuredOutputsParams | None) -> None:
    edits = logit_edits()
    edits.admit(request(0, max_tokens=None, min_tokens=2**40, stop_token_ids=[9], structured_outputs=grammar))
    assert abs(int(gather(edits, 0).edits_B2N[0, 1, 0])) == 2**31 - 1


LARGEST: dict[str, Any] = dict(
    bad_words=[[1] * (MAX_BAD_WORD_TOKENS - 1), [2]], logit_bias=dict.fromkeys(range(MAX_LOGIT_EDITS - 2), 1)
)


@pytest.mark.parametrize("has_fixed_shapes", [True, False])
def test_largest_request_changes_no_other_row_and_no_graph_shape(has_fixed_shapes: bool) -> None:
    edits = logit_edits(has_fixed_shapes)
    edits.admit(request(0, [[6, 7]]))
    without = gather(edits, 0, 1)
    edits.admit(request(1, **LARGEST))
    largest = gather(edits, 0, 1)
    rows, edited, prefix = 2, MAX_LOGIT_EDITS, MAX_BAD_WORD_TOKENS
    assert [table.shape for table in largest] == [(rows, 2, edited), (rows, edited), (rows, 3, prefix)]
    edits.admit(request(1))
    for before, during, after in zip(without, largest, gather(edits, 0, 1), strict=True):
        assert (before.shape == during.shape) == has_fixed_shapes
        assert torch.equal(before[0], during[0, ..., : before.shape[-1]])
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    "params",
    [dict(logit_bias=dict.fromkeys(range(MAX_LOGIT_EDITS + 1), 1)), dict(bad_words=[[1] * (MAX_BAD_WORD_TOKENS + 1)])],
)
def test_oversized_request_is_refused_without_trace(params: dict[str, Any]) -> None:
    edits = logit_edits()
    with pytest.raises(ValueError, match="front end should have rejected"):
        edits.admit(request(0, **params))
    assert not gather(edits, 0).bias_BN.any()


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_match_vllm(seed: int) -> None:
    """At each position of a verify step, whose drafts count as output; few tokens, so that prefixes match."""
    vocab, queries, generator = 6, 4, np.random.default_rng(seed)
    lengths = [(3, 0), (1, 1), (2, 9), (5, 30)]  # of each row's prompt and output, without drafts
    history = [generator.integers(3, size=sum(length) + queries).tolist() for length in lengths]
    words = [
        [generator.integers(3, size=generator.integers(1, 8)).tolist() for _ in range(generator.integers(1, 30))]
        for _ in lengths
    ]
    edits = logit_edits(has_fixed_shapes=seed % 2 == 0)
    for row, bad_words in enumerate(words):
        edits.admit(request(row, bad_words))
    newest = [sum(length) - 1 for length in lengths]
    positions_BQ = torch.tensor(newest, dtype=torch.int32)[:, None] + torch.arange(queries, dtype=torch.int32)
    tables, prompt_len_B = gather(edits, *range(len(words))), torch.tensor([prompt for prompt, _ in lengths])

    def tokens_at(rows_B: torch.Tensor, at_BQP: torch.Tensor) -> torch.Tensor:
        found = [np.take(history[row], at_QP) for row, at_QP in zip(rows_B, at_BQP, strict=True)]
        return torch.from_numpy(np.stack(found)).int()

    requests: Any = SimpleNamespace(tokens_at=tokens_at)
    inputs: Any = SimpleNamespace(logit_edits=tables, prompt_len_B=prompt_len_B)
    recent_BQP, num_outputs_BQ = gather_recent_outputs(requests, torch.arange(len(words)), positions_BQ, inputs)
    logits_BQV = torch.randn(len(words), queries, vocab)
    expected_BQV = logits_BQV.clone()
    for query in range(queries):
        ends = [last + 1 + query for last in newest]
        outputs = [line[prompt:end] for line, (prompt, _), end in zip(history, lengths, ends, strict=True)]
        apply_bad_words(expected_BQV[:, query], dict(enumerate(words)), outputs)
    assert torch.equal(apply_logit_edits(logits_BQV, tables, recent_BQP, num_outputs_BQ), expected_BQV)
    assert expected_BQV.isinf().any()
