"""vLLM's example of a KV connector, which stores prompts in a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.upstream.patching import patches


@patches(
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector._found_match_for_prompt",
)
def recompute_one_token_beyond_blocks(
    original: Callable[..., bool], self: Any, prompt_token_ids: list[int], mm_hashes: list[str]
) -> bool:
    """Let the example compute a prompt that has one token more than whole blocks.

    Reason: Upstream offers one block less of such a prompt than it then loads. It offers a negative number of tokens if
    the prefix cache has that block, and for a prompt of one token. The engine ends.
    Remove when: `ExampleConnector` rounds lengths in one way.
    """
    return len(prompt_token_ids) % self._block_size != 1 and original(self, prompt_token_ids, mm_hashes)
