"""vLLM concatenates the masks of a step; each request takes its own."""

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput

from tests.support.fakes import step
from vllm_gaudi_spec.sampling.grammars import read_grammars


def test_each_request_has_one_mask_more_than_drafts() -> None:
    scheduled = step({"a": 1, "b": 3, "c": 1})
    scheduled.scheduled_spec_decode_tokens = {"b": [7, -1], "x": [1, 2, 3]}
    masks = np.arange(10).reshape(5, 2).astype(np.int32)
    found = read_grammars(GrammarOutput(["a", "b", "c"], masks, [0, 1, 0]), scheduled)
    assert {name: grammar.mask_NW.tolist() for name, grammar in found.items()} == {
        "a": [[0, 1]],
        "b": [[2, 3], [4, 5], [6, 7]],
        "c": [[8, 9]],
    }
    assert {name: grammar.num_acceptable for name, grammar in found.items()} == {"a": 0, "b": 1, "c": 0}
