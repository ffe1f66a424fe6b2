"""The patch of vLLM's example of a KV connector still has its reasons."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from vllm_gaudi_spec import upstream

BLOCK = 16


@pytest.fixture
def connector(tmp_path: Path) -> Any:
    """A connector that has stored all prompts of token 1."""
    made: Any = object.__new__(ExampleConnector)
    made._block_size, made._storage_path = BLOCK, str(tmp_path)
    made._generate_foldername_debug = lambda *args, **named: str(tmp_path)
    return made


def request(length: int, num_outputs: int = 0) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[1] * length, num_prompt_tokens=length, num_output_tokens=num_outputs, mm_features=[]
    )


def test_prompt_of_whole_blocks_and_one_token_is_computed(connector: Any) -> None:
    upstream.recompute_resumed_requests()
    offered = [connector.get_num_new_matched_tokens(request(length), 0)[0] for length in (1, 2, 16, 17, 18, 32, 33, 34)]
    assert offered == [0, 0, 0, 0, 16, 16, 0, 32]


def test_upstream_still_rounds_in_two_ways(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, so does a reason for `recompute_resumed_requests`."""
    upstream.recompute_resumed_requests()
    original = ExampleConnector.get_num_new_matched_tokens.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(ExampleConnector, "get_num_new_matched_tokens", original)
    assert connector.get_num_new_matched_tokens(request(1), 0)[0] < 0
    assert connector.get_num_new_matched_tokens(request(2 * BLOCK + 1), 2 * BLOCK)[0] < 0
    loaded = example_connector.ReqMeta.make_meta([1] * (2 * BLOCK + 1), [3, 4, 5], BLOCK, is_store=False, mm_hashes=[])
    assert len(loaded.token_ids) > connector.get_num_new_matched_tokens(request(2 * BLOCK + 1), 0)[0]
