"""vLLM's example KV connector, which stores prompts in a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.upstream.patching import patches


@patches(
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector.get_num_new_matched_tokens",
)
def recompute_resumed_requests(
    original: Callable[..., tuple[int | None, bool]], self: Any, request: Any, num_computed_tokens: int
) -> tuple[int | None, bool]:
    """Make the engine recompute the KV of resumed requests, and of prompts that exceed whole blocks by one token.

    Reason: after a preemption, upstream looks for a file that contains both prompt and output, but such a file is never
    stored. For a prompt that exceeds whole blocks by one token, upstream offers one block less than it loads. The
    number of offered tokens may therefore be negative, for example for a prompt with one token, and the engine then
    exits.
    Remove when: `ExampleConnector` rounds lengths consistently and loads only what it has stored.
    """
    if request.num_output_tokens or request.num_prompt_tokens % self._block_size == 1:
        return 0, False
    return original(self, request, num_computed_tokens)
