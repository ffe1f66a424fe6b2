"""A running server's /metrics: what the dashboard and the page ask for is there, and what ours say is right."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.full_tests.prompts import random_prompts
from tests.full_tests.server import Server
from tests.full_tests.tiny_models import VOCAB
from tests.promql import check_all
from vllm_gaudi_spec.drafting.universal.token_bytes import load_tokenizer, read_vocabulary
from vllm_gaudi_spec.drafting.universal.vocab_map import match_vocabularies
from vllm_gaudi_spec.metrics import COVERAGE, SERIES

DRAFTERS_VOCAB, LONGEST, K = 300, 96, 3


@contextmanager
def serving(target: str, log: Path, *options: str, **speculative: Any) -> Iterator[Server]:
    drafts = ["--speculative-config", json.dumps(dict(num_speculative_tokens=K) | speculative)]
    with Server(target, log, "--max-model-len", "256", "--max-num-seqs", "4", *drafts, *options) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(looping_llama: str, stranger: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve with a drafter of another vocabulary that is rarely right, adaptive verification, and audits.

    No figure of clients may show audits.
    """
    log = tmp_path_factory.mktemp("metrics") / "log.txt"
    audits = ["--additional-config", json.dumps({"gaudi_spec": {"audit_every": 1}})]
    drafter = dict(method="universal_draft", model=stranger, max_model_len=LONGEST, enable_adaptive_verification=True)
    with serving(looping_llama, log, *audits, **drafter) as server:
        yield server


def families(server: Server) -> list[Metric]:
    server.wait_idle()
    return list(text_string_to_metric_families(server.client.get("/metrics").text))


def by_label(server: Server, series: str, label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in (sample for family in families(server) for sample in family.samples):
        if sample.name == series:
            found[sample.labels[label]] = found.get(sample.labels[label], 0) + sample.value
    return found


def ask(server: Server, length: int = 10, num_tokens: int = 60, drafts: int | None = None, seed: int = 0) -> None:
    (prompt,) = random_prompts([length], VOCAB, seed=seed)
    body: dict[str, Any] = dict(prompt=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True)
    if drafts is not None:
        body["vllm_xargs"] = dict(num_speculative_tokens=drafts)
    assert server.complete(**body)["usage"]["completion_tokens"] == num_tokens


def ask_for_much(server: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda place: ask(server, 5 + place, drafts=[None, None, 1][place % 3], seed=place), range(12)))


def check_sums(server: Server) -> dict[str, float]:
    """Figures of ours beside each other and beside vLLM's; returns the reasons."""
    rows, by_choice = (
        {int(number): count for number, count in by_label(server, f"gaudi_spec:{name}_total", "num_drafts").items()}
        for name in ("rows", "rows_by_choice")
    )
    reasons = by_label(server, "gaudi_spec:rows_without_drafts_total", "reason")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    # An answer's tokens: the prompt's, and of each row that decoded one and those that were accepted.
    made = server.metric("vllm:generation_tokens_total") - server.metric("vllm:request_success_total")
    assert sum(rows.values()) == made - accepted > 0
    assert sum(by_choice.values()) == sum(rows.values())
    assert sum(reasons.values()) == rows[0]
    assert sum(rows.values()) - rows[0] == server.metric("vllm:spec_decode_num_drafts_total") > 0
    assert sum(number * count for number, count in rows.items()) == server.metric(
        "vllm:spec_decode_num_draft_tokens_total"
    )
    assert rows[1] > 0, "some asked for one"
    return reasons


def test_dashboard_and_page_name_exported_series(drafting: Server) -> None:
    ask(drafting)
    found = families(drafting)
    shown = check_all(found)
    described = {family.name: family for family in found}
    for name in SERIES:
        assert shown & {sample.name for sample in described[name].samples}, f"{name} is in no panel"
    # Of a counter there is also the time at which it began.
    exported = {name.removesuffix("_created") for name in described if "gaudi" in name}
    assert exported == set(SERIES)


def test_row_counters_add_up(drafting: Server) -> None:
    ask_for_much(drafting)
    reasons = check_sums(drafting)
    assert reasons["goodput"] > 0, "the drafter is nearly always wrong"
    assert by_label(drafting, "gaudi_spec:rows_by_choice_total", "num_drafts")["0"] >= reasons["goodput"]
    assert drafting.metric("gaudi_spec:skipped_steps_total") > 0
    assert [reasons[name] for name in ("load", "unverified", "fault", "off")] == [0] * 4


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (dict(num_tokens=20, drafts=0), dict(request=19)),
        # The first token comes with the prompt, the last one is the end.
        (dict(num_tokens=10, length=LONGEST + 4), dict(length=8, ending=1)),
    ],
    ids=["request", "length"],
)
def test_a_row_without_drafts_has_a_reason(asked: dict[str, int], expected: dict[str, int], drafting: Server) -> None:
    before = by_label(drafting, "gaudi_spec:rows_without_drafts_total", "reason")
    ask(drafting, **asked)
    after = by_label(drafting, "gaudi_spec:rows_without_drafts_total", "reason")
    assert {reason: after[reason] - before[reason] for reason in after if after[reason] != before[reason]} == expected


def test_vocabulary_coverage_is_exported(drafting: Server, looping_llama: str, stranger: str) -> None:
    ask(drafting)
    sides = [read_vocabulary(load_tokenizer(path)) for path in (looping_llama, stranger)]
    found = match_vocabularies(*sides, VOCAB, DRAFTERS_VOCAB).num_matched
    assert 0 < found < VOCAB
    shown = by_label(drafting, COVERAGE, "vocabulary")
    assert shown == {"target": pytest.approx(found / VOCAB), "drafter": pytest.approx(found / DRAFTERS_VOCAB)}


def test_audits_run_while_idle_and_count_no_client(drafting: Server) -> None:
    """A request that comes meanwhile is answered as ever; see `check_sums` for the figures."""

    def audits() -> dict[str, float]:
        return by_label(drafting, "gaudi_spec:audits_total", "result")

    before = audits()
    ask_for_much(drafting)
    limit = time.monotonic() + 600
    while sum(audits().values()) < sum(before.values()) + 12:
        assert time.monotonic() < limit, audits()
        time.sleep(0.2)
    assert audits()["different"] == 0
    check_sums(drafting)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_row_counters_of_several_ranks_add_up(kind: str, looping_llama: str, cousin: str, tmp_path: Path) -> None:
    """Of tensor-parallel ranks one speaks; data-parallel ones are engines with figures of their own."""
    drafter = dict(method="draft_model", model=cousin)
    with serving(looping_llama, tmp_path / "log.txt", f"--{kind}-parallel-size", "2", **drafter) as server:
        ask_for_much(server)
        check_sums(server)
        steps = by_label(server, "gaudi_spec:steps_total", "engine")
        reads = by_label(server, "gaudi_spec:host_syncs_total", "engine")
        assert set(steps) == ({"0"} if kind == "tensor" else {"0", "1"})
        for engine in steps:
            assert 0.8 * steps[engine] < reads[engine] <= steps[engine]


@pytest.mark.slow
def test_disable_log_stats_exports_nothing(looping_llama: str, tmp_path: Path) -> None:
    with serving(looping_llama, tmp_path / "log.txt", "--disable-log-stats", method="ngram_gpu") as server:
        ask(server)
        assert not {"vllm:", "gaudi_spec:"} & set(re.findall(r"(?m)^\w+:", server.client.get("/metrics").text))


@pytest.mark.slow
@pytest.mark.parametrize("match_as", ["tli", "slem"])
def test_drafter_limit_counts_its_own_tokens(match_as: str, looping_llama: str, twin: str, tmp_path: Path) -> None:
    own = dict(universal_context="retokenize", universal_match=match_as, universal_kv_len=64)
    options = ["--additional-config", json.dumps({"gaudi_spec": own})]
    with serving(looping_llama, tmp_path / "log.txt", *options, method="universal_draft", model=twin) as server:
        ask(server, length=100, num_tokens=12)
        reasons = by_label(server, "gaudi_spec:rows_without_drafts_total", "reason")
        assert {reason: count for reason, count in reasons.items() if count} == dict(length=10, ending=1)
        ask_for_much(server)
        check_sums(server)
