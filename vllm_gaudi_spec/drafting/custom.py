"""vLLM's method `custom_class`, for which `model` names the user's drafter class.

vLLM passes arrays from its runner to such a class. This module builds these arrays for the requests that may draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_spec.records import Context
from vllm_gaudi_spec.upstream.worker import create_custom_proposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.drafting.base import DraftingContext


class CustomProposer:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self._proposer = create_custom_proposer(vllm_config)
        self._width = vllm_config.model_config.max_model_len
        self._num_seen: dict[str, int] = {}
        """Maps each request to its length when the drafter last ran. Later tokens are new to the drafter."""

    @classmethod
    def build(cls, context: DraftingContext) -> CustomProposer:
        proposer = cls(context.vllm_config)
        if hasattr(proposer._proposer, "load_model"):
            proposer._proposer.load_model(context.target.model)
        return proposer

    def propose(self, contexts: list[Context]) -> list[Sequence[int]]:
        if not contexts:
            return []
        lengths_np = np.array([context.tokens_np.size for context in contexts], dtype=np.int32)
        tokens_np = np.zeros((len(contexts), max(self._width, int(lengths_np.max()))), dtype=np.int32)
        for row_np, context in zip(tokens_np, contexts, strict=True):
            row_np[: context.tokens_np.size] = context.tokens_np
        sampled = [self._get_new_tokens(context) for context in contexts]
        outputs = self._proposer.propose(sampled, lengths_np, tokens_np, slot_mappings=None)
        # Update the lengths after the call, because a drafter that raised an exception has not processed these tokens.
        self._num_seen.update((context.req_id, context.tokens_np.size) for context in contexts)
        if len(outputs) != len(contexts):
            raise ValueError(
                f"{type(self._proposer).__name__}.propose returned {len(outputs)} lists for {len(contexts)} requests. "
                "Return one list per request, empty if it has no drafts."
            )
        return [_strip_padding(output) for output in outputs]

    def forget(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._num_seen.pop(req_id, None)

    @property
    def num_remembered(self) -> int:
        return len(self._num_seen)

    def _get_new_tokens(self, context: Context) -> list[int]:
        """Return the tokens sampled in this step, which vLLM passes separately.

        The result is never empty, because an empty list tells the drafter that the prompt is still being processed.
        """
        begin = self._num_seen.get(context.req_id, context.num_prompt)
        new: list[int] = context.tokens_np[min(begin, context.tokens_np.size - 1) :].tolist()
        return new


def _strip_padding(output: Sequence[int]) -> Sequence[int]:
    """Return the tokens before the first -1, which vLLM's drafters use as padding. The caller validates them."""
    return list(takewhile(lambda token: token != -1, output)) if isinstance(output, Iterable) else output
