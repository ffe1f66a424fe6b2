"""vLLM's example of a KV connector, which stores prompts in a folder."""

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
    """Let the engine compute a request that resumes, and a prompt that has one token more than whole blocks.

    Reason: After a preemption upstream looks for a file of prompt and output, which nobody stored. It offers one block
    less of such a prompt than it then loads: a negative number of tokens if the prefix cache has that block, and for a
    prompt of one token. The engine ends.
    Remove when: `ExampleConnector` rounds lengths in one way and loads only what it has stored.
    """
    if request.num_output_tokens or request.num_prompt_tokens % self._block_size == 1:
        return 0, False
    return original(self, request, num_computed_tokens)
