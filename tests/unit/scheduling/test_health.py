"""When a drafter is switched off, when a row is, and how the workers and Prometheus learn of it."""

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.schedulers import NUM_DRAFTS, PROMPT, answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.metrics import DRAFTER_FAULTS, DRAFTER_SWITCHED_OFF
from vllm_gaudi_spec.outputs import DrafterStatus
from vllm_gaudi_spec.records import DraftRound
from vllm_gaudi_spec.scheduling.health import DrafterHealth
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler

GOOD = DraftRound()
BAD = DraftRound(("a", "b"), worked=False)
ONE_ROW = DraftRound(("b",), worked=True)
ALONE, NEXT, ANOTHER = (DraftRound((name,), worked=False) for name in "abc")


@pytest.mark.parametrize(
    ("rounds", "is_off"),
    [
        ([BAD, BAD], False),
        ([BAD, BAD, GOOD, BAD], False),
        ([BAD, GOOD, BAD, BAD, BAD], True),
        ([ONE_ROW] * 5, False),
        ([BAD, BAD, ONE_ROW, BAD], False),
        ([ALONE] * 10, False),
        ([ALONE] * 10 + [GOOD, BAD, BAD], False),
        ([ALONE, ALONE, NEXT, NEXT, ANOTHER], True),
        ([ALONE, BAD, ALONE], True),
    ],
)
def test_drafter_is_disabled_after_three_faulty_rounds(
    rounds: list[DraftRound], is_off: bool, caplog: pytest.LogCaptureFixture
) -> None:
    health = DrafterHealth()
    logging.getLogger("vllm_gaudi_spec").addHandler(caplog.handler)
    for done in rounds:
        health.observe([done])
    assert health.is_off == is_off
    assert health.num_faults == sum(bool(done.faulty) for done in rounds)
    # Where loggers pass records on, the handler gets the same one twice.
    errors = {id(record) for record in caplog.records if record.levelname == "ERROR"}
    assert len(errors) == is_off
    logging.getLogger("vllm_gaudi_spec").removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ([[], [GOOD, BAD], [], [ONE_ROW]], [None, (("a", "b"), (), 1), None, ((), ("b",), 2)]),
        # Once it may be the drafter's fault; then it is the request that drafts no more, and the next one does.
        ([[ALONE], [ALONE] * 9, [GOOD, NEXT, GOOD, NEXT]], [(("a",), (), 1), ((), ("a",), 10), (("b",), (), 12)]),
    ],
)
def test_failing_request_is_excluded_and_the_drafter_stays(
    observed: list[list[DraftRound]], expected: list[tuple[tuple[str, ...], tuple[str, ...], int] | None]
) -> None:
    health = DrafterHealth()
    for rounds, status in zip(observed, expected, strict=True):
        health.observe(rounds)
        wanted = status and DrafterStatus(status[0], status[1], is_off=False, num_faults=status[2])
        assert health.take_status() == wanted


Kind = type[SpecScheduler | SpecAsyncScheduler]


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("kind", [SpecScheduler, SpecAsyncScheduler])
def test_schedulers_send_drafter_status_to_workers(kind: Kind, is_adaptive: bool, tmp_path: Path) -> None:
    upstream.apply()
    scheduler: Any = scheduler_of(kind, tmp_path, speculative=dict(enable_adaptive_verification=is_adaptive))
    for name in "ab":
        scheduler.add_request(Request(name, PROMPT, SamplingParams(max_tokens=200), None))
    counted = dict.fromkeys((DRAFTER_FAULTS, DRAFTER_SWITCHED_OFF), 0.0)
    words = []
    for _ in range(3):
        scheduled = scheduler.schedule()
        assert scheduled.num_spec_tokens_to_schedule == NUM_DRAFTS
        words.append(pickle.loads(pickle.dumps(scheduled)).drafter_status)
        worker_output: Any = answer({"a": [1], "b": [4]}, {})
        worker_output.draft_rounds = [BAD]
        outputs = scheduler.update_from_output(scheduled, worker_output)
        sent = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0]))
        for name in counted:
            counted[name] += sent.scheduler_stats.gaudi_spec.get(name, {"": 0})[""]
    assert [status and status.num_faults for status in words] == [None, 1, 2]
    last, after = scheduler.schedule(), scheduler.schedule()
    assert last.drafter_status.is_off
    assert last.num_spec_tokens_to_schedule == after.num_spec_tokens_to_schedule == 0
    assert after.drafter_status is None
    assert not after.scheduled_spec_decode_tokens
    assert (counted[DRAFTER_FAULTS], counted[DRAFTER_SWITCHED_OFF]) == (3, 1)
