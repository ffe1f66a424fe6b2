"""Hostile requests to a server that speculates and overlaps its steps: answered or refused, and nobody else notices.

The draft model lies in a folder that is hostile as well, and the target's own is trusted.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests.abuse import bodies, sizes
from tests.full_tests.abuse.examples import examples, together
from tests.full_tests.abuse.folders import hostile_copy, ran
from tests.full_tests.abuse.judge import Judge
from tests.full_tests.abuse.watcher import NORMAL, Watcher, said
from tests.full_tests.resident import Resident, meet_every_length
from tests.full_tests.server import Server

MAX_LEN, ROWS = 512, 8
BUDGET = 128
"""Tokens of a step: prompts are cut, and a step has so few lengths that all are met before memory is looked at."""
PICKED_ID = 7


@pytest.fixture(scope="module")
def draft(cousin: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_copy(cousin, tmp_path_factory.mktemp("hostile") / "draft")


@pytest.fixture(scope="module")
def server(looping_llama: str, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    speculation = dict(method="draft_model", model=str(draft), num_speculative_tokens=3, draft_sample_method="greedy")
    limits = ["--max-model-len", str(MAX_LEN), "--max-num-seqs", str(ROWS), "--max-num-batched-tokens", str(BUDGET)]
    with pytest.MonkeyPatch.context() as patch:
        # One request may ask for 16384 answers; that takes minutes and is no fault.
        patch.setenv("VLLM_MAX_N_SEQUENCES", "8")
        # Compiled grammars are kept, half a gigabyte of them, and each hostile request brings another.
        patch.setenv("VLLM_XGRAMMAR_CACHE_MB", "8")
        server = Server(
            looping_llama,
            tmp_path_factory.mktemp("abuse") / "log.txt",
            *("--speculative-config", json.dumps(speculation), "--async-scheduling", "--trust-remote-code"),
            *("--per-request-spec-decode-metrics", "summary"),
            *limits,
        )
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def watcher(server: Server) -> Iterator[Watcher]:
    with Watcher(server) as watcher:
        yield watcher


@pytest.fixture(scope="module")
def resident(server: Server) -> Resident:
    meet_every_length(server, BUDGET)
    return Resident.of(server)


@pytest.fixture(scope="module")
def judge(server: Server) -> Judge:
    return Judge(server)


@pytest.fixture(autouse=True)
def nobody_notices(server: Server, watcher: Watcher, resident: Resident) -> Iterator[None]:
    resident.sample()
    yield
    assert server.process.poll() is None, server.log.read_text()[-3000:]
    assert server.client.get("/health").status_code == 200
    watcher.check()
    resident.sample()


def test_server_drafts_and_overlaps_steps(server: Server) -> None:
    """It overlaps its steps, and drafts are accepted; else nothing below shows what it says."""
    assert "Async scheduling is disabled" not in server.log.read_text()
    server.complete(**NORMAL[0] | dict(max_tokens=100))
    server.wait_idle()
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.parametrize("num_requests", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_requests_get_no_server_error(num_requests: int, judge: Judge, resident: Resident) -> None:
    """What no description says: numbers that JSON does not have, lone surrogates, constraints, ids."""
    requests = examples(bodies.completions, num_requests)
    together(lambda body: judge.send_json("/v1/completions", **body), requests, resident.sample)
    print(f"{len(requests)} requests, answers so far {dict(judge.answers)}; {resident.now:.0f} MiB")
    assert len(requests) >= num_requests * 0.8


# ---- length ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [MAX_LEN - 25, MAX_LEN - 1])
def test_drafts_up_to_the_context_limit_change_nothing(num_tokens: int, judge: Judge) -> None:
    """Drafts are made up to the last position, and change nothing of the text."""
    body = dict(prompt=[PICKED_ID] * num_tokens, max_tokens=MAX_LEN - num_tokens, temperature=0, ignore_eos=True)
    answers = [
        judge.send_json("/v1/completions", vllm_xargs=dict(num_speculative_tokens=wanted), **body).json()
        for wanted in (0, 3, 2**62)
    ]
    assert [answer["usage"]["total_tokens"] for answer in answers] == [MAX_LEN] * 3
    assert len({said(answer)[0] for answer in answers}) == 1


# ---- drafts that never count -------------------------------------------------------------------------------


def test_grammar_that_accepts_no_draft(judge: Judge) -> None:
    forced = "zq" * 12
    body = dict(prompt="The quick brown fox", temperature=0, max_tokens=60)
    free = judge.send_json("/v1/completions", **body).json()
    answer = judge.send_json("/v1/completions", structured_outputs=dict(regex=forced), **body).json()
    assert said(answer) == [forced]
    assert free["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0, free["metrics"]
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 0, answer["metrics"]


@pytest.mark.parametrize(
    "wanted", [-1, 1.5, "3", "", [1], ["1"], 2**63, -(2**63), float("nan"), float("inf"), None, {"a": 1}]
)
def test_hostile_number_of_drafts_is_refused(wanted: Any, judge: Judge) -> None:
    """What is no number of drafts is refused with its name; a number that is too large means as many as there are."""
    body = dict(prompt="hi", max_tokens=8, temperature=0, ignore_eos=True)
    response = judge.send_json("/v1/completions", vllm_xargs={"num_speculative_tokens": wanted}, **body)
    if wanted == 2**63:
        assert response.status_code == 200, response.text
    else:
        assert response.status_code == 400
        assert "num_speculative_tokens" in response.text or "vllm_xargs" in response.text, response.text


def test_unknown_arguments_are_ignored(judge: Judge) -> None:
    strange = {"": 1, "\0": "x", "__class__": "x", "num_speculative_tokens ": 3, "a" * 10_000: 1.5, "list": ["x", 2]}
    assert judge.send_json("/v1/completions", prompt="hi", max_tokens=2, vllm_xargs=strange).status_code == 200


def test_memory_does_not_grow(resident: Resident) -> None:
    """Before requests of hostile size, which have a budget of their own and leave pages with the allocator."""
    assert resident.grown() == []


# ---- size ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sizes.CASES)
def test_large_request_stays_within_its_budget(name: str, judge: Judge, watcher: Watcher, resident: Resident) -> None:
    cost = sizes.Scales(judge, watcher, resident).measure(name)
    print(cost)
    assert cost.is_within_budget, cost


# ---- outside ---------------------------------------------------------------------------------------------


def test_a_request_reaches_no_other_server_and_no_file(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0.5)
        for url in (f"http://127.0.0.1:{other.getsockname()[1]}/x.png", f"file://{tmp_path}/secret"):
            for kind in ("image_url", "audio_url", "video_url"):
                content = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "What is it?"}]
                messages = [dict(role="user", content=content)]
                response = judge.send_json("/v1/chat/completions", messages=messages, max_tokens=2)
                assert 400 <= response.status_code < 500
        with pytest.raises(TimeoutError):
            other.accept()


# ---- afterwards ------------------------------------------------------------------------------------------


def test_server_is_unchanged_afterwards(
    server: Server, watcher: Watcher, judge: Judge, resident: Resident, draft: Path
) -> None:
    """All rows and blocks are free, others saw what they always saw, and nothing was run."""
    with ThreadPoolExecutor(ROWS) as pool:  # as many as there are rows: one that was lost would be missed
        together = list(pool.map(lambda body: said(server.complete(**body)), [NORMAL[0]] * ROWS))
    assert together == [watcher.expected[0]] * ROWS
    watcher.__exit__(None, None, None)
    watcher.check()
    server.wait_idle()
    print(
        f"{judge.num_tried} hostile requests, answers {dict(judge.answers)}; "
        f"{watcher.num_compared} answers of others compared, {len(watcher.changed)} changed; "
        f"memory {', '.join(f'{name}: {growth}' for name, growth in resident.growth().items())}"
    )
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert watcher.num_compared >= 2 * len(NORMAL)
    assert ran(draft) == []
