"""vLLM's batch-invariant product is where we look for it: this fails when upstream moves it."""

from __future__ import annotations

import inspect

from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

from vllm_gaudi_spec.upstream.layers import batch_invariant_linear


def test_the_product_takes_what_a_linear_layer_has() -> None:
    theirs, ours = (list(inspect.signature(of).parameters) for of in (linear_batch_invariant, batch_invariant_linear))
    assert theirs == ["input", *ours[1:]]
