"""What is tolerated as upstream's fault is that fault alone; no server is needed."""

import json
from typing import Any

import pytest
import schemathesis

from tests.full_tests.abuse.judge import UPSTREAM_FAULTS, Judge
from tests.full_tests.server import Server

PATH = "/v1/responses"
TEXT = json.dumps({"error": {"message": "list index out of range", "code": 500}})
EMPTY = {"role": "assistant", "type": "message", "id": "m", "status": "completed", "content": []}
USER = {"role": "user", "content": "hi"}
OTHERS: list[Any] = [
    {"input": "hi"},
    {"input": []},
    {"input": [USER]},
    {"input": [{**USER, "content": []}]},
    {"input": [{**EMPTY, "content": [{"type": "output_text", "text": "a", "annotations": []}]}]},
    {"input": EMPTY},
    [EMPTY],
    None,
]


def case(body: Any) -> schemathesis.Case:
    described = {
        "openapi": "3.1.0",
        "info": {"title": "x", "version": "1"},
        "paths": {PATH: {"post": {"responses": {"200": {"description": "fine"}}}}},
    }
    return schemathesis.openapi.from_dict(described)[PATH]["POST"].Case(body=body, media_type="application/json")


FORMS = [case, json.dumps, lambda body: json.dumps(body).encode()]


@pytest.fixture
def judge() -> Judge:
    return Judge(Server.__new__(Server))  # only `send` asks it


@pytest.mark.parametrize("form", FORMS, ids=["case", "text", "bytes"])
def test_one_cause_is_tolerated_and_no_other(form: Any, judge: Judge) -> None:
    judge.check(PATH, form({"input": [USER, EMPTY]}), 500, TEXT)
    assert judge.tolerated == {"list index out of range": 1}
    for body in OTHERS:
        with pytest.raises(AssertionError, match="/v1/responses answered 500 to "):
            judge.check(PATH, form(body), 500, TEXT)
    assert judge.tolerated.total() == 1


def test_what_is_no_json_asks_for_nothing(judge: Judge) -> None:
    for sent in (b"", b"\xff\xfe", b"[" * 100_000, "{"):
        with pytest.raises(AssertionError):
            judge.check(PATH, sent, 500, TEXT)


def test_other_faults_are_known_by_their_words(judge: Judge) -> None:
    for fault in UPSTREAM_FAULTS:
        if fault.asks is None:
            judge.check(fault.path, b"", 500, fault.words)
    with pytest.raises(AssertionError):
        judge.check("/v1/completions", json.dumps({"input": [EMPTY]}), 500, TEXT)
    judge.check("/v1/completions", b"", 400, "refused")
    assert judge.tolerated.total() == len(UPSTREAM_FAULTS) - 1
