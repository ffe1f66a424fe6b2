"""The scheduler reports the blocks that a KV connector fills."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from tests.support.schedulers import answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.refusals import features
from vllm_gaudi_spec.scheduling.scheduler import SpecScheduler

BLOCK = 16
SHARED = list(range(2, 2 + BLOCK))
LONG = [*SHARED, *range(100, 100 + 2 * BLOCK), 7, 8]


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(features, "_connector_refusals", lambda *args: ())  # the device may refuse connectors
    upstream.apply()
    init_none_hash(sha256)
    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path / "kv")},
    )
    return scheduler_of(
        SpecScheduler,
        tmp_path,
        kv_transfer_config=config,
        enable_chunked_prefill=False,
        max_num_batched_tokens=512,
        max_num_seqs=4,
    )


def add(scheduler: Any, name: str, tokens: list[int], max_tokens: int = 2) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler.add_request(Request(name, tokens, params, None, block_hasher=hasher))


def offers(patch: pytest.MonkeyPatch, end: int, *, later: bool) -> None:
    """Let the connector have the first tokens of any prompt."""

    def matched(self: Any, request: Request, num_computed: int) -> tuple[int, bool]:
        found = max(0, min(end, request.num_tokens - 2) - num_computed)
        return found, later and found > 0

    patch.setattr(ExampleConnector, "get_num_new_matched_tokens", matched)


@pytest.mark.parametrize("later", [False, True], ids=["before the forward", "meanwhile"])
def test_blocks_beyond_the_prefix_cache_are_loaded(
    scheduler: Any, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(scheduler, "first", [*SHARED, 5])
    step = scheduler.schedule()
    assert step.loaded_blocks == []
    scheduler.update_from_output(step, answer({"first": [9]}, {}))
    offers(monkeypatch, 3 * BLOCK, later=later)
    if later:  # the example knows no loads between steps
        monkeypatch.setattr(ExampleConnector, "update_state_after_alloc", lambda *args: None)
    add(scheduler, "second", LONG)
    step = scheduler.schedule()
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("second")
    assert step.loaded_blocks == blocks[1:3]
    assert ("second" in step.num_scheduled_tokens) != later
    if not later:
        return
    done = ModelRunnerOutput(["first"], {"first": 0}, sampled_token_ids=[[9]])
    done.kv_connector_output = KVConnectorOutput(finished_recving={"second"})
    scheduler.update_from_output(step, done)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens["second"] >= len(LONG) - 3 * BLOCK
    assert step.loaded_blocks == []


@pytest.mark.parametrize("recomputes", [False, True], ids=["fail", "recompute"])
def test_failed_load_ends_the_request_or_is_recomputed(
    scheduler: Any, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.recompute_kv_load_failures = recomputes
    offers(monkeypatch, 3 * BLOCK, later=True)
    monkeypatch.setattr(ExampleConnector, "update_state_after_alloc", lambda *args: None)
    add(scheduler, "only", LONG)
    step = scheduler.schedule()
    assert len(step.loaded_blocks) == 3
    done = ModelRunnerOutput([], {})
    done.kv_connector_output = KVConnectorOutput(finished_recving={"only"}, invalid_block_ids={step.loaded_blocks[1]})
    outputs = scheduler.update_from_output(step, done)
    offers(monkeypatch, 0, later=False)
    step = scheduler.schedule()
    if recomputes:
        # The blocks from the failed one on are computed here.
        assert step.num_scheduled_tokens["only"] == len(LONG) - BLOCK
        assert step.loaded_blocks == []
    else:
        assert [output.finish_reason.name for output in outputs[0].outputs] == ["ERROR"]
        assert not step.num_scheduled_tokens


def test_request_that_finds_no_room_loads_nothing(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, 3 * BLOCK, later=False)
    monkeypatch.setattr(scheduler.kv_cache_manager, "allocate_slots", lambda *args, **named: None)
    add(scheduler, "only", LONG)
    assert scheduler.schedule().loaded_blocks == []


def test_preempted_request_is_computed_again(scheduler: Any) -> None:
    """Only prompts are stored, and upstream would look for the output as well."""
    add(scheduler, "only", LONG, max_tokens=60)
    for token in range(20):
        step = scheduler.schedule()
        scheduler.update_from_output(step, answer({"only": [token]}, {}))
    folder = Path(scheduler.connector._storage_path)
    names = scheduler.connector._generate_foldername_debug
    scheduler.connector._generate_foldername_debug = lambda *args, **named: str(folder)  # all prompts were stored
    folder.mkdir(exist_ok=True)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    step = scheduler.schedule()
    scheduler.connector._generate_foldername_debug = names
    assert step.num_scheduled_tokens["only"] == len(LONG) + 20
    assert step.loaded_blocks == []
    assert not step.kv_connector_metadata.requests
