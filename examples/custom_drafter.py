r"""A drafter of your own, for the method `custom_class`: it drafts the last token again and again.

PYTHONPATH=examples .venv/bin/vllm serve MODEL --speculative-config \
    '{"method": "custom_class", "model": "custom_drafter.RepeatLastToken", "num_speculative_tokens": 2}'
"""

from typing import Any

import numpy as np


class RepeatLastToken:
    def __init__(self, vllm_config: Any) -> None:
        self.num_drafts = vllm_config.speculative_config.num_speculative_tokens

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the draft tokens of each request.

        Args:
            sampled_token_ids: The tokens that the last step added to each request.
            num_tokens_no_spec: The number of tokens of each request.
            token_ids_cpu: The tokens of each request, padded to the same length.
        """
        return [
            [int(tokens[length - 1])] * self.num_drafts
            for tokens, length in zip(token_ids_cpu, num_tokens_no_spec, strict=True)
        ]
