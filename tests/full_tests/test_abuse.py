"""Hostile requests to a server that drafts and overlaps its steps: answered or refused, and no other answer changes."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.full_tests.server import Server

MAX_LEN, ROWS = 512, 8
ANSWER_SECONDS = 60
"""The time limit of an answer. A step takes milliseconds and a request has at most 512 tokens, so a longer answer
hangs."""
_LONG: dict[str, Any] = dict(max_tokens=60, ignore_eos=True)
_SEEDED = dict(temperature=1.0, seed=11)
NORMAL: list[dict[str, Any]] = [
    dict(prompt="The quick brown fox", temperature=0, **_LONG),
    dict(prompt="A device compiles a graph", temperature=0, logprobs=2, **_LONG),
    dict(prompt="0123456789 " * 5, n=2, top_k=20, repetition_penalty=1.2, **_LONG, **_SEEDED),
    dict(prompt="yes or no?", structured_outputs=dict(regex="(yes|no|maybe){4}"), max_tokens=24, **_SEEDED),
    dict(prompt="The quick brown fox", vllm_xargs=dict(num_speculative_tokens=0), temperature=0, **_LONG),
]

integers = st.sampled_from(
    [-(2**63) - 1, -(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 399, 400, 511, 512, 513, 2**31, 2**32, 2**63 - 1, 2**63]
)
numbers = st.one_of(
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 0.5, 1.0, 1.5, 1e30, 1e308]), integers
)
texts = st.one_of(
    st.sampled_from(["", " ", "\n", "\0", "\ud800", "é" * 3, "\U0010ffff", "a" * 2000, "</s>", "{{7*7}}"]),
    st.text(st.characters(exclude_categories=[]), max_size=20),
)
token_ids = st.one_of(st.integers(0, 399), integers)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
prompts = st.one_of(
    *(texts, st.just("The quick brown fox"), st.just([7] * 511), st.lists(token_ids, max_size=8)),
    st.lists(st.integers(0, 399), min_size=1, max_size=40),
    st.lists(st.one_of(texts, st.lists(token_ids, max_size=4)), max_size=3),
)
schemas = [
    *({"type": "string", "pattern": "(a+)+$"}, {"type": "array", "items": {"$ref": "#"}}, {"$ref": "#/nowhere"}),
    *({"enum": []}, {"type": "integer", "minimum": 5, "maximum": 1}, {"type": "string", "minLength": 10**9}, True),
]
regexes = st.one_of(st.sampled_from(["[0-9]+", "(", "a{1000000}", "(a|b)*c", "(?=a)b", "\\1", ""]), texts)
grammars = st.one_of(st.sampled_from(['root ::= "a"', "root ::= root", "root ::= (", "x ::= y"]), texts)
constraints = st.one_of(
    st.builds(dict, json=st.one_of(st.sampled_from(schemas), anything)),
    st.builds(dict, regex=regexes),
    st.builds(dict, grammar=grammars),
    st.builds(dict, choice=st.lists(texts, max_size=4)),
    st.builds(dict, regex=regexes, choice=st.lists(texts, max_size=2)),
)


def _each(names: str, kind: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    return dict.fromkeys(names.split(), kind)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **_each("temperature top_p min_p presence_penalty frequency_penalty repetition_penalty length_penalty", numbers),
    **_each("top_k seed logprobs prompt_logprobs max_tokens min_tokens truncate_prompt_tokens priority", integers),
    **_each("stream_interval thinking_token_budget", integers),
    **_each("use_beam_search ignore_eos include_stop_str_in_output skip_special_tokens echo stream", st.booleans()),
    **_each("request_id cache_salt suffix prompt_embeds", texts),
    **_each("repetition_detection kv_transfer_params extra_args stream_options", anything),
    **_each("stop_token_ids allowed_token_ids logprob_token_ids", st.lists(token_ids, max_size=6)),
    "n": st.one_of(integers, st.integers(1, 4)),
    "logit_bias": st.dictionaries(st.one_of(token_ids.map(str), texts), numbers, max_size=6),
    "stop": st.one_of(texts, st.lists(texts, max_size=6)),
    "bad_words": st.lists(texts, max_size=4),
    "structured_outputs": constraints,
    "vllm_xargs": st.one_of(
        st.builds(dict, num_speculative_tokens=st.one_of(numbers, texts, anything)),
        st.dictionaries(texts, st.one_of(numbers, texts), max_size=3),
    ),
}
# Up to five fields: of more, one is nearly always refused, and the others are never looked at.
completions = st.lists(st.sampled_from(sorted(FIELDS)), max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names} | {"prompt": prompts})
)


def draw_requests(count: int) -> list[dict[str, Any]]:
    """Return about `count` requests, the same in each run."""
    made: list[dict[str, Any]] = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(one=completions)
    def keep(one: dict[str, Any]) -> None:
        made.append(dict(max_tokens=6) | one)

    keep()
    return made


@pytest.fixture(scope="module")
def server(looping_llama: str, cousin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    speculation = dict(method="draft_model", model=cousin, num_speculative_tokens=3, draft_sample_method="greedy")
    with pytest.MonkeyPatch.context() as patch:
        # One request may ask for 16384 answers; that takes minutes and is no fault.
        patch.setenv("VLLM_MAX_N_SEQUENCES", "8")
        server = Server(
            looping_llama,
            tmp_path_factory.mktemp("abuse") / "log.txt",
            *("--speculative-config", json.dumps(speculation), "--async-scheduling"),
            *("--per-request-spec-decode-metrics", "summary"),
            *("--max-model-len", str(MAX_LEN), "--max-num-seqs", str(ROWS), "--max-num-batched-tokens", "128"),
        )
    with server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[str]]:
    """The answers to `NORMAL` of an idle server, which drafts."""
    assert "Async scheduling is disabled" not in server.log.read_text()
    found = [said(server.complete(**body)) for body in NORMAL]
    server.wait_idle()
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    return found


def said(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def send(server: Server, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    """Send numbers that JSON does not have and lone surrogates as Python writes them; no answer may be a 5xx."""
    content = json.dumps({"model": "tiny"} | body)
    headers = {"content-type": "application/json"}
    response = server.client.post(path, content=content, headers=headers, timeout=ANSWER_SECONDS)
    codes = [response.status_code, *(code for line in response.text.splitlines() if (code := _error_code(line)))]
    assert 200 <= min(codes) <= max(codes) < 500, f"{codes} to {content[:1000]}: {response.text[:500]}"
    return response


def _error_code(line: str) -> int | None:
    """Return the code of an error inside a stream, whose status was sent long before."""
    try:
        return int(json.loads(line.removeprefix("data: "))["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return None


@pytest.mark.parametrize("num_requests", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_requests_change_no_other_answer(num_requests: int, server: Server, expected: list[list[str]]) -> None:
    requests = draw_requests(num_requests)
    assert len(requests) >= num_requests * 0.8
    with ThreadPoolExecutor(2) as others, ThreadPoolExecutor(6) as pool:
        hostile = [pool.submit(send, server, **body) for body in requests]
        while not all(each.done() for each in hostile):
            assert list(others.map(lambda body: said(server.complete(**body)), NORMAL)) == expected
        for each in hostile:
            each.result()
    # Use every row, so that a row that was lost is missed.
    with ThreadPoolExecutor(ROWS) as pool:
        assert list(pool.map(lambda body: said(server.complete(**body)), [NORMAL[0]] * ROWS)) == [expected[0]] * ROWS
    server.wait_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("num_tokens", [MAX_LEN - 25, MAX_LEN - 1])
def test_drafts_up_to_the_context_limit_change_nothing(num_tokens: int, server: Server) -> None:
    body = dict(prompt=[7] * num_tokens, max_tokens=MAX_LEN - num_tokens, temperature=0, ignore_eos=True)
    answers = [send(server, vllm_xargs=dict(num_speculative_tokens=wanted), **body).json() for wanted in (0, 3, 2**62)]
    assert [answer["usage"]["total_tokens"] for answer in answers] == [MAX_LEN] * 3
    assert len({said(answer)[0] for answer in answers}) == 1


def test_grammar_that_accepts_no_draft(server: Server) -> None:
    forced = "zq" * 12
    body = dict(prompt="The quick brown fox", temperature=0, max_tokens=60)
    free = send(server, **body).json()
    answer = send(server, structured_outputs=dict(regex=forced), **body).json()
    assert said(answer) == [forced]
    assert free["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0, free["metrics"]
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 0, answer["metrics"]


@pytest.mark.parametrize("wanted", [-1, 1.5, "3", [1], 2**63, -(2**63), float("nan"), float("inf"), None, {"a": 1}])
def test_hostile_number_of_drafts_is_refused(wanted: Any, server: Server) -> None:
    """A number that is too large means as many as there are."""
    response = send(server, prompt="hi", max_tokens=8, vllm_xargs={"num_speculative_tokens": wanted})
    assert response.status_code == (200 if wanted == 2**63 else 400)
    if response.status_code == 400:
        assert "num_speculative_tokens" in response.text or "vllm_xargs" in response.text, response.text


def test_unknown_arguments_are_ignored(server: Server) -> None:
    strange = {"": 1, "\0": "x", "__class__": "x", "num_speculative_tokens ": 3, "a" * 10_000: 1.5, "list": ["x", 2]}
    assert send(server, prompt="hi", max_tokens=2, vllm_xargs=strange).status_code == 200


def test_a_request_reaches_no_other_server_and_no_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0.5)
        for url in (f"http://127.0.0.1:{other.getsockname()[1]}/x.png", f"file://{tmp_path}/secret"):
            for kind in ("image_url", "audio_url", "video_url"):
                content = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "What is it?"}]
                messages = [dict(role="user", content=content)]
                assert send(server, "/v1/chat/completions", messages=messages, max_tokens=2).status_code >= 400
        with pytest.raises(TimeoutError):
            other.accept()
