"""Audits in the engine: what they find, what they leave alone, and whom they make way for."""

import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tests.support.fakes import CapturingBackend
from tests.support.schedulers import PROMPT, scheduler_of
from tests.support.small_engine import FAVORITES, ROOMY, STANDARD, SmallEngine, Variant
from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.scheduling import audits
from vllm_gaudi_spec.scheduling.scheduler import SpecScheduler

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=1.0),
    dict(temperature=0.7, seed=2, top_k=5),
    dict(temperature=1.0, top_p=0.8, min_p=0.02, stop_token_ids=FAVORITES[2:3]),
    dict(temperature=0, presence_penalty=1.0, frequency_penalty=0.5),
    dict(temperature=0.9, logit_bias={FAVORITES[0]: -100, 30: 7.0}, repetition_penalty=1.2),
    dict(temperature=1.0, min_tokens=6, stop_token_ids=FAVORITES[:2], logprobs=2, prompt_logprobs=1),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm_gaudi_spec" / "audits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def engine_of(folder: Path, method: str = "ngram", every: int = 1, **more: Any) -> SmallEngine:
    return SmallEngine(Variant(method, num_blocks=ROOMY, audit_every=every, **more), folder)


def ask(engine: SmallEngine, count: int, max_tokens: int = 30, kinds: list[dict[str, Any]] = KINDS) -> None:
    """Requests by fours, and what follows in idle steps."""
    begin = len(engine.texts)
    for number in range(begin, begin + count):
        rng = random.Random(number)
        prompt = rng.choices(range(2, 200), k=rng.randint(3, 12))
        engine.add(str(number), prompt, SamplingParams(max_tokens=max_tokens, **kinds[number % len(kinds)]))
        if number % 4 == 3:
            engine.finish()
    engine.finish()


def results(engine: SmallEngine) -> dict[str, int]:
    return {value: int(count) for (name, value), count in engine.counts.items() if name == metrics.AUDITS}


def skipped(engine: SmallEngine) -> dict[str, int]:
    return {value: int(count) for (name, value), count in engine.counts.items() if name == metrics.AUDITS_SKIPPED}


class Errs:
    """A rule that accepts a share of the drafts that it should reject."""

    def __init__(self, engine: SmallEngine, share: float) -> None:
        verifier = engine.runner.device_step.verifier
        self.rule, self.share, self.random = verifier.rule, share, torch.Generator().manual_seed(0)
        self.num_errors = 0
        verifier.rule = self

    def __call__(self, logits_BQV: Any, positions_BQ: Any, proposed: Any, inputs: Any) -> Verification:
        verification: Verification = self.rule(logits_BQV, positions_BQ, proposed, inputs)
        accepted_B = verification.num_sampled_B - 1
        draws_B = torch.rand(len(accepted_B), generator=self.random)
        tokens_BQ = verification.tokens_BQ.clone()
        for row in ((accepted_B < proposed.num_drafts_B) & (draws_B < self.share)).nonzero().flatten().tolist():
            tokens_BQ[row, accepted_B[row]] = proposed.tokens_BK[row, accepted_B[row]]
            self.num_errors += 1
        return verification._replace(tokens_BQ=tokens_BQ)


# --- what audits find ---


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", [Variant().backend, CapturingBackend])
def test_audit_of_exact_rule_finds_no_difference(folder: Path, overlap: bool, backend: Any) -> None:
    engine = engine_of(folder, "ngram_gpu", overlap=overlap, backend=backend)
    ask(engine, 2 * len(KINDS), max_tokens=20)
    assert results(engine) == {metrics.IDENTICAL: 2 * len(KINDS)}
    assert not skipped(engine)


@pytest.mark.parametrize("every", [1, 16])
def test_audit_finds_rule_that_errs_at_1_percent_of_positions(folder: Path, cache: Path, every: int) -> None:
    engine = engine_of(folder, every=every)
    rule = Errs(engine, 0.01)
    while not results(engine).get(metrics.DIFFERENT):
        ask(engine, 16)
        assert len(engine.texts) < 2000
    assert rule.num_errors
    print(f"found after {len(engine.texts)} requests and {rule.num_errors} errors, one of {every} audited")
    (file,) = cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = json.loads(file.read_text())
    assert found["with_drafts"] in engine.texts.values()
    position = found["position"]
    assert found["with_drafts"][:position] == found["without_drafts"][:position]
    pair = found["with_drafts"][position], found["without_drafts"][position]
    assert pair[0] != pair[1]
    assert found["scores"].keys() == {str(token) for token in pair}


def test_differences_are_counted_if_no_file_can_be_written(folder: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    engine = engine_of(folder)
    Errs(engine, 1.0)
    ask(engine, 4)
    assert results(engine)[metrics.DIFFERENT]


@pytest.mark.parametrize(("tolerance", "kind"), [(0.5, metrics.TIE), (1e-4, metrics.DIFFERENT)])
def test_rounding_within_tolerance_is_a_tie(folder: Path, tolerance: float, kind: str) -> None:
    """Steps with drafts compute other logits here, by up to 0.2."""
    engine = engine_of(folder)
    engine.scheduler._audits._tolerance = tolerance
    exact, noise = engine.runner.device_step.verifier.rule, torch.Generator().manual_seed(0)

    def rounds(logits_BQV: torch.Tensor, *rest: Any) -> Verification:
        if logits_BQV.shape[1] > 1:
            logits_BQV += 0.2 * (2 * torch.rand(logits_BQV.shape, generator=noise) - 1)
        return exact(logits_BQV, *rest)

    engine.runner.device_step.verifier.rule = rounds
    kinds = [one for one in KINDS if one["temperature"] in (0, 1.0)]
    ask(engine, 40, kinds=kinds)
    found = results(engine)
    assert found.keys() <= {metrics.IDENTICAL, kind} or kind == metrics.DIFFERENT
    assert found[kind] > 5


def test_requests_without_the_same_tokens_are_not_audited(folder: Path) -> None:
    """Greedy requests are compared under any rule."""
    engine = engine_of(folder, STANDARD)
    ask(engine, 6, kinds=[dict(temperature=0), dict(temperature=0.8, seed=1)])
    assert results(engine) == {metrics.IDENTICAL: 3}
    assert skipped(engine) == {metrics.PROBABILISTIC: 3}


# --- whom they make way for ---


@pytest.mark.parametrize("overlap", [False, True])
def test_client_request_interrupts_audit(folder: Path, overlap: bool) -> None:
    engine = engine_of(folder, "ngram_gpu", overlap=overlap)
    engine.add("first", [5, 6, 7], SamplingParams(max_tokens=20, temperature=1.0))
    while engine.running:
        engine.step()
    for _ in range(6):
        engine.step()
    scheduler = engine.scheduler
    assert [request.client_index for request in scheduler.running] == [audits.AUDITOR]
    assert not scheduler.has_unfinished_requests()
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.has_requests()
    engine.add("second", [8, 9], SamplingParams(max_tokens=4, temperature=0))
    assert {*scheduler.requests} == {"second"}
    scheduled: list[set[str]] = []
    original = scheduler.schedule

    def schedule(*args: Any) -> Any:
        output = original(*args)
        scheduled.append({*output.num_scheduled_tokens})
        return output

    scheduler.schedule = schedule
    while engine.running:
        engine.step()
    assert scheduled[0] == {"second"}
    assert {name for step in scheduled for name in step} == {"second"}
    engine.finish()
    assert results(engine) == {metrics.IDENTICAL: 2}


def test_aborted_request_is_compared_up_to_its_last_token(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add("0", [5, 6, 7], SamplingParams(max_tokens=30, temperature=1.0))
    engine.add("1", [5, 6, 7], SamplingParams(max_tokens=30, temperature=1.0))
    engine.abort("1")
    for _ in range(6):
        engine.step()
    engine.abort("0")
    engine.finish()
    assert results(engine) == {metrics.IDENTICAL: 1}
    assert skipped(engine) == {metrics.ABORTED: 1}


def test_number_of_waiting_audits_is_limited(folder: Path) -> None:
    engine = engine_of(folder)
    for number in range(audits.MAX_WAITING + 3):
        engine.add(str(number), [5], SamplingParams(max_tokens=1))
    engine.finish()
    assert results(engine) == {metrics.IDENTICAL: audits.MAX_WAITING}
    assert skipped(engine) == {metrics.BUSY: 3}


# --- what they leave alone ---


def test_audit_ids_cannot_be_guessed(folder: Path) -> None:
    """Results of an aborted audit's last step would otherwise reach a request that has taken its id."""
    ids = []
    for _ in range(2):
        engine = engine_of(folder)
        engine.add("0", [5, 6, 7], SamplingParams(max_tokens=4, temperature=0))
        while not engine.scheduler._audits.is_running:
            engine.step()
        ids += [name for name in engine.scheduler.requests if name != "0"]
    assert len({*ids}) == 2


def audited(tmp_path: Path, **speculative: Any) -> Any:
    options = dict(additional_config={"gaudi_spec": {"audit_every": 1}})
    return scheduler_of(SpecScheduler, tmp_path, speculative=speculative, **options)


def test_unseeded_request_gets_a_known_seed(tmp_path: Path) -> None:
    scheduler = audited(tmp_path)
    chosen = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0)]
    for name, params in enumerate([*chosen, SamplingParams(temperature=1.0)]):
        scheduler.add_request(Request(str(name), PROMPT, params, None))
    seeds = [request.sampling_params.seed for request in scheduler.requests.values()]
    assert seeds[1:3] == [3, None]
    assert seeds[0] != seeds[3]
    assert chosen[0].seed is None, "the user may use the object again"


@pytest.mark.parametrize(
    ("cause", "params", "more"),
    [
        (metrics.LORA, {}, dict(lora_request=LoRARequest("a", 1, "/a"))),
        (metrics.GRAMMAR, dict(structured_outputs=StructuredOutputsParams(regex="a")), {}),
        (metrics.PENALTIES, dict(repetition_penalty=1.1, presence_penalty=0.5), {}),
        (metrics.INPUTS, {}, dict(mm_features=[object()])),
    ],
)
def test_skipped_audits_are_counted_by_cause(
    cause: str, params: dict[str, Any], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = audited(tmp_path)
    request = Request("0", PROMPT, SamplingParams(**params), None, **more)
    scheduler._audits.on_added(request)
    assert scheduler.step_metrics.take()[metrics.AUDITS_SKIPPED] == {cause: 1}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("how", ["pause", "reset", "abort all"])
def test_pause_and_reset_drop_audits(how: str, started: bool, tmp_path: Path) -> None:
    scheduler = audited(tmp_path)
    request = Request("0", PROMPT, SamplingParams(max_tokens=9, temperature=0), None)
    scheduler.add_request(request)
    request.append_output_token_ids([1, 2])
    scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    assert scheduler.has_requests(), "an audit waits"
    if started:
        assert len(scheduler.schedule().num_scheduled_tokens) == 1
    if how == "pause":
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
    elif how == "reset":
        assert scheduler.reset_prefix_cache()
    else:
        assert scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED) == []
    assert not scheduler.requests
    scheduler.schedule()
    assert not scheduler.has_requests()
    assert scheduler.step_metrics.take()[metrics.AUDITS_SKIPPED] == {metrics.RESET: 1}


@pytest.mark.parametrize("how", ["pause", "reset"])
def test_request_running_across_a_pause_or_reset_is_not_audited(how: str, folder: Path) -> None:
    """A worker extension may change the model meanwhile: it would then have written the second half alone."""
    engine = engine_of(folder)
    engine.add("0", [5, 6, 7], SamplingParams(max_tokens=20, temperature=0))
    for _ in range(3):
        engine.step()
    if how == "pause":
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    else:
        engine.interrupt()
    target: Any = engine.runner.target
    logits = target.logits
    target.logits = lambda *given: logits(*given).roll(1, -1)
    engine.finish()
    assert len(engine.texts["0"]) == 20
    assert not results(engine)
    assert skipped(engine) == {metrics.RESET: 1}
