"""A drafter's fault changes no output. It is counted; three in a row switch the drafter off, with one error."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM

from tests.full_tests import heads
from tests.full_tests.engines import counter
from tests.full_tests.faults import broken
from tests.full_tests.ranks import ranks_agree
from tests.full_tests.speculation import MODES, accepted, custom, speculating
from tests.full_tests.workload import Plain, Request, check_same, mixed_requests, run_together
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.drafting.draft_model import AutoregressiveProposer
from vllm_gaudi_spec.drafting.head import HeadProposer
from vllm_gaudi_spec.drafting.ngram import DeviceNgramProposer
from vllm_gaudi_spec.drafting.universal.text_drafting import RetokenizedProposer
from vllm_gaudi_spec.metrics import DRAFTER_FAULTS, DRAFTER_SWITCHED_OFF
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.scheduling.health import MAX_FAULTS_IN_A_ROW


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(24)


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Collect the errors that this project or vLLM logs. A handler would be lost, since the first engine of a process
    replaces them."""
    found: list[str] = []
    make = logging.getLogRecordFactory()

    def make_and_keep(name: str, level: int, *more: Any, **named: Any) -> logging.LogRecord:
        record = make(name, level, *more, **named)
        if level >= logging.ERROR and name.startswith("vllm"):
            found.append(record.getMessage())
        return record

    logging.setLogRecordFactory(make_and_keep)
    yield found
    logging.setLogRecordFactory(make)


def check_counts(llm: LLM, errors: list[str], faults: int | None, off: bool) -> None:
    """`faults`: as many as the metric has to show; None: some."""
    shown = counter(llm, DRAFTER_FAULTS)
    assert shown == faults if faults is not None else shown > 0
    assert counter(llm, DRAFTER_SWITCHED_OFF) == off
    assert len(errors) == off, errors
    (report,) = llm.collective_rpc("step_report")
    assert report["drafter"]["off"] == off
    assert report["host_syncs_per_step"] <= 1


# --- a user's own class ---


def raises(drafts: list[list[int]]) -> Any:
    raise ZeroDivisionError("a drafter's own mistake")


NONSENSE: dict[str, broken.Answer] = {
    "raises": raises,
    "one row short": lambda drafts: drafts[:-1],
    "ids past the vocabulary": lambda drafts: [[10**6] * len(row) for row in drafts],
}


def custom_breaks(k: int = 3) -> dict[str, Any]:
    return custom("Breaks", k) | dict(model=f"{broken.__name__}.Breaks")


class TestUsersClassNowAndThen:
    """Cases that leave their drafter on, in one engine."""

    @pytest.fixture(scope="class")
    def own_class(self, looping_llama: str, plain: Plain) -> Iterator[LLM]:
        plain(looping_llama)  # by an engine of its own, before this one opens
        with speculating(looping_llama, custom_breaks()) as llm:
            yield llm

    @pytest.mark.parametrize("what", NONSENSE)
    def test_faults_now_and_then_are_counted(
        self, what: str, own_class: LLM, looping_llama: str, requests: list[Request], plain: Plain, errors: list[str]
    ) -> None:
        """Two steps of five break. As many are counted, and the drafter stays on."""
        drafter = broken.plan(lambda call: call % 5 < 2, NONSENSE[what])
        before, verified = counter(own_class, DRAFTER_FAULTS), accepted(own_class)
        check_same(requests, run_together(own_class, requests), plain(looping_llama))
        expected = sum(call % 5 < 2 for call in range(drafter.num_calls))
        check_counts(own_class, errors, before + expected, off=False)
        assert accepted(own_class) > verified

    def test_faulty_row_does_not_affect_its_neighbors(
        self, own_class: LLM, looping_llama: str, requests: list[Request], plain: Plain, errors: list[str]
    ) -> None:
        """A row whose drafts are no tokens while others' are is counted once and drafts no more: nothing is switched
        off for its neighbors, however often it happens."""
        broken.plan(lambda call: True, lambda drafts: [[10**6], *drafts[1:]] if len(drafts) > 1 else drafts)
        before, verified = counter(own_class, DRAFTER_FAULTS), accepted(own_class)
        check_same(requests, run_together(own_class, requests), plain(looping_llama))
        faults = counter(own_class, DRAFTER_FAULTS)
        assert MAX_FAULTS_IN_A_ROW < faults - before <= len(requests) + 4, "n = 2 makes two rows of one request"
        check_counts(own_class, errors, faults, off=False)
        assert accepted(own_class) > verified


def test_three_faults_in_a_row_switch_the_drafter_off(
    looping_llama: str, requests: list[Request], plain: Plain, errors: list[str]
) -> None:
    """Three faults, one error, and the drafter is not asked again: not by later requests either."""
    expected, healthy = plain(looping_llama), 20
    drafter = broken.plan(lambda call: call >= healthy, raises)
    with speculating(looping_llama, custom_breaks()) as llm:
        for _ in range(2):
            check_same(requests, run_together(llm, requests), expected)
            check_counts(llm, errors, MAX_FAULTS_IN_A_ROW, off=True)
            assert drafter.num_calls == healthy + MAX_FAULTS_IN_A_ROW
            assert accepted(llm) > 0


# --- drafters on the device ---


def spoilt(folder: Path, source: str, spoil: Callable[[dict[str, torch.Tensor]], None]) -> str:
    folder.mkdir()
    for file in Path(source).iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_text(file.read_text())
    weights = load_file(Path(source) / "model.safetensors")
    spoil(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def all_nan(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)


def one_nan(weights: dict[str, torch.Tensor]) -> None:
    """In the output matrix: one logit of every row is no number."""
    name = next(name for name in weights if name.endswith("lm_head.weight"))
    weights[name][17, 0] = torch.nan


@pytest.mark.parametrize("overlapping", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", quick_and_slow(["standard"], MODES))
@pytest.mark.parametrize("spoil", [all_nan, pytest.param(one_nan, marks=pytest.mark.slow)])
def test_draft_model_with_nan_is_switched_off(
    spoil: Callable[[dict[str, torch.Tensor]], None],
    mode: str,
    overlapping: bool,
    looping_llama: str,
    requests: list[Request],
    plain: Plain,
    errors: list[str],
    tmp_path: Path,
) -> None:
    """A checkpoint that was spoilt: it loads. No draft of it is ever verified, so even where only a law is promised the
    tokens are those of no speculation; it is switched off after three steps and those in flight."""
    drafter = spoilt(tmp_path / "drafter", looping_llama, spoil)
    config = dict(method="draft_model", model=drafter, num_speculative_tokens=3, **MODES[mode])
    expected = plain(looping_llama)
    with speculating(looping_llama, config, async_scheduling=overlapping) as llm:
        for _ in range(2):
            check_same(requests, run_together(llm, requests), expected)
            faults = counter(llm, DRAFTER_FAULTS)
            assert MAX_FAULTS_IN_A_ROW <= faults <= MAX_FAULTS_IN_A_ROW + 3
            check_counts(llm, errors, faults, off=True)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") == 0


Way = Callable[[str], tuple[str, dict[str, Any], dict[str, Any]]]


@pytest.fixture
def way(looping_llama: str, twin: str) -> Way:
    """Of a method: a target, the speculative configuration and the engine's options."""

    def of(method: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        if method == "draft_model":
            return looping_llama, dict(method=method, model=looping_llama, num_speculative_tokens=3), {}
        if method == "eagle":
            return heads.target(method), heads.head(method, 3), {}
        if method == "ngram_gpu":
            config = dict(method=method, num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=4)
            return looping_llama, config, {}
        universal = dict(universal_context="retokenize") | ({"universal_match": "slem"} if method == "slem" else {})
        config = dict(method="universal_draft", model=twin, num_speculative_tokens=3)
        return looping_llama, config, dict(additional_config=dict(gaudi_spec=universal))

    return of


HOWS = ("raises", "ids", "negative_ids", "counts", "negative_counts", "shapes")
METHODS: dict[str, Any] = {
    "draft_model": AutoregressiveProposer,
    "eagle": HeadProposer,
    "ngram_gpu": DeviceNgramProposer,
    "retokenize": RetokenizedProposer,
    "slem": RetokenizedProposer,
}
# Drafters that read text work behind a step's read: their steps never overlap.
CASES = [
    (method, how, overlapping)
    for method in METHODS
    for how in HOWS
    for overlapping in ((False,) if method in ("retokenize", "slem") else (True, False))
]


@pytest.mark.parametrize(("method", "how", "overlapping"), quick_and_slow([("draft_model", "raises", True)], CASES))
def test_faults_on_the_device_are_counted(
    method: str,
    how: str,
    overlapping: bool,
    way: Way,
    requests: list[Request],
    plain: Plain,
    errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every tenth round breaks, and later requests find a drafter that is well: a draft model that is the target is
    right again as soon as it has read anew what it may have missed. Then all break, and it is switched off."""
    target, config, options = way(method)
    expected = plain(target)
    fault = broken.BreaksOnDevice(how, lambda call: call % 10 == 5)
    monkeypatch.setattr(METHODS[method], "propose", fault.around(METHODS[method].propose))
    with speculating(target, config, async_scheduling=overlapping, **options) as llm:
        check_same(requests, run_together(llm, requests), expected)
        assert fault.num_rounds > 10
        shown = counter(llm, DRAFTER_FAULTS)
        assert shown == pytest.approx(sum(map(fault.at, range(fault.num_rounds))), abs=2)
        if method != "slem":  # which reads twice
            check_counts(llm, errors, shown, off=False)
        drafted, right = counter(llm, "vllm:spec_decode_num_draft_tokens"), accepted(llm)
        assert right > 0
        if method == "draft_model":
            greedy = [request for request in requests if request.params.temperature == 0 and not edited(request)]
            fault.at = lambda call: False
            check_same(greedy, run_together(llm, greedy), [expected[requests.index(request)] for request in greedy])
            more, more_right = counter(llm, "vllm:spec_decode_num_draft_tokens") - drafted, accepted(llm) - right
            assert more_right > 0.9 * more > 0, "a draft model that is the target is right"
        fault.at = lambda call: True
        check_same(requests, run_together(llm, requests), expected)
        assert counter(llm, DRAFTER_SWITCHED_OFF) == 1
        assert len(errors) == 1


def edited(request: Request) -> bool:
    params = request.params
    return bool(params.presence_penalty or params.bad_words)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a prompt", "every step"])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafter_whose_forward_raises_is_counted(
    method: str,
    where: str,
    way: Way,
    requests: list[Request],
    plain: Plain,
    errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its forward raises: now and then outputs stay and drafting goes on; always, and it is switched off."""
    target, config, _ = way(method)
    expected = plain(target)
    calls = 0
    working = LoadedModel.forward

    def forward(self: LoadedModel, inputs: Any, carried_TH: Any = None) -> Any:
        nonlocal calls
        if self is drafter():
            calls += 1
            if where == "every step" or calls % 50 == 7:
                raise RuntimeError("injected: the drafter cannot read")
        return working(self, inputs, carried_TH)

    def drafter() -> Any:
        runner = engines[0].llm_engine.model_executor.driver_worker.worker.model_runner if engines else None
        return runner and runner.drafter

    engines: list[LLM] = []
    monkeypatch.setattr(LoadedModel, "forward", forward)
    with speculating(target, config) as llm:
        engines.append(llm)
        for _ in range(2):
            check_same(requests, run_together(llm, requests), expected)
        check_counts(llm, errors, None, off=where == "every step")
        engines.clear()


def spoil_one_round(worker: Any) -> None:
    """On the second rank the whole drafter says what is no number, once."""
    drafter: Any = worker.model_runner.drafter
    logits, calls = drafter.logits, 0

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        said: torch.Tensor = logits(hidden)
        return said.fill_(torch.nan) if calls == 12 else said

    if worker.rank == 1:
        drafter.logits = spoilt


ONE_RANK = [("draft_model", "greedy"), ("draft_model", "standard"), ("retokenize", "greedy"), ("slem", "greedy")]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "mode"), ONE_RANK)
def test_nan_on_one_rank_drops_the_drafts_on_all(
    method: str, mode: str, way: Way, requests: list[Request], plain: Plain, errors: list[str]
) -> None:
    """Of ranks that each have the whole drafter: the others do without those drafts too, and the scheduler hears, which
    only hears the first."""
    target, config, options = way(method)
    config = config | dict(draft_tensor_parallel_size=1) | MODES[mode]
    greedy = [request for request in requests if request.params.temperature == 0]
    expected = [answer for request, answer in zip(requests, plain(target), strict=True) if request in greedy]
    with speculating(target, config, tensor_parallel_size=2, **options) as llm:
        llm.collective_rpc(spoil_one_round)
        check_same(greedy, run_together(llm, greedy), expected)
        ranks_agree(llm, 2)
        assert counter(llm, DRAFTER_FAULTS) == 1
        assert accepted(llm) > 0
        assert [report["drafter"] for report in llm.collective_rpc("step_report")] == [dict(faults=1, off=False)] * 2
    assert not errors
