"""Random requests, up to two hundred at a time, with drafts, beside what each gets alone without them.

All requests go to a real server at once, which has memory for one or two of the longest. Afterwards each is sent once
more by itself with `num_speculative_tokens` 0 and a cache salt of its own. Greedy and seeded requests promise the same
answer; of others it is checked that the answer keeps what they ask for. Then clients send all again and leave early:
the server must hold no block, row or record of any request.

`ADVERSARY_SEED=7` draws other configurations and requests. A difference is printed with the request's JSON, and
`ADVERSARY_REQUESTS='[{...}]'` sends these requests in place of drawn ones: `pytest -m "" -k draft_model-0` with the
configuration's name.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tests.full_tests.adversary.bodies import Drawing
from tests.full_tests.adversary.configurations import MAX_LEN, METHODS, Configuration, draw
from tests.full_tests.adversary.judge import Judge
from tests.full_tests.server import Server
from tests.full_tests.tiny_models import looping_llama as make_looping_llama
from tests.full_tests.tiny_models import save
from tests.support.processes import ROOT

NUM_REQUESTS, QUICK_REQUESTS = 200, 48
SEED = os.environ.get("ADVERSARY_SEED", "0")
QUICK = [("draft_model", 3), ("retokenize", 0)]
DRAWN = 5
"""Configurations of each method."""
MOST_ALIVE = 4
LEAK_SECONDS = 60
COUNTERS = ("generation_tokens", "spec_decode_num_accepted_tokens", "num_preemptions")
ALL = [(method, number) for method in METHODS for number in range(DRAWN)]


@pytest.fixture(scope="module")
def close_relative(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter that is right most of the time."""

    def build() -> PreTrainedModel:
        model = make_looping_llama()
        with torch.no_grad():
            weight = model.lm_head.weight
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
        return model

    return save(build, tmp_path_factory.mktemp("close-relative"))


@contextmanager
def serving(configuration: Configuration, request: pytest.FixtureRequest, log: Path) -> Iterator[tuple[Server, str]]:
    target = configuration.target or request.getfixturevalue("looping_llama")
    speculative = dict(configuration.speculative)
    if configuration.drafter:
        speculative["model"] = request.getfixturevalue(configuration.drafter)
    given = ["--speculative-config", json.dumps(speculative)]
    given += ["--additional-config", json.dumps({"gaudi_spec": configuration.extra})]
    given += ["--worker-extension-cls", "tests.full_tests.adversary.inside.Inside"]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with Server(target, log, *configuration.options, *given, environment=environment) as server:
        yield server, target


def bodies_for(configuration: Configuration, target: str, num_requests: int) -> list[dict[str, Any]]:
    if given := os.environ.get("ADVERSARY_REQUESTS"):
        return list(json.loads(given))
    described = AutoConfig.from_pretrained(target)
    drawing = Drawing(
        described.vocab_size, described.eos_token_id, configuration.num_drafts, MAX_LEN, configuration.has_priorities
    )
    return [drawing.draw(f"{configuration}/{index}") for index in range(num_requests)]


def ask(server: Server, body: dict[str, Any]) -> httpx.Response:
    asked = dict(model="tiny", return_token_ids=True, return_tokens_as_token_ids=True) | body
    return server.client.post("/v1/completions", json=asked)


def ask_together(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(lambda body: ask(server, body), bodies))


def is_promised(configuration: Configuration, body: dict[str, Any]) -> bool:
    """Whether the answer must be the same with drafts and without."""
    return not body["temperature"] or (configuration.promises_seeds and "seed" in body)


def find_faults(judge: Judge, body: dict[str, Any], response: httpx.Response) -> list[str]:
    if response.status_code == 200:
        return judge.find_faults(body, response.json())
    return [] if response.status_code == 400 else [f"answered {response.status_code}: {response.text[:300]}"]


def compare_with_alone(
    server: Server, judge: Judge, index: int, body: dict[str, Any], response: httpx.Response
) -> list[str]:
    """Ask once more, alone and without drafts, and return what differs."""
    alone = ask(server, body | dict(vllm_xargs=dict(num_speculative_tokens=0), cache_salt=f"alone {index}"))
    if alone.status_code != response.status_code:
        return [f"{response.status_code} became {alone.status_code}: {response.text[:300]} {alone.text[:300]}"]
    if alone.status_code == 200:
        before = len(judge.tally.different)
        judge.compare(f"request {index}", body, response.json(), alone.json())
        return judge.tally.different[before:]
    return []


def send_and_leave(server: Server, bodies: list[dict[str, Any]]) -> None:
    """Send all requests at once from clients that leave within half a second."""
    rng = random.Random(0)

    def leave(body: dict[str, Any], seconds: float) -> None:
        with suppress(httpx.TransportError):
            httpx.post(server.client.base_url.join("/v1/completions"), json=dict(model="tiny") | body, timeout=seconds)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(leave, bodies, [rng.uniform(0.01, 0.5) for _ in bodies]))


def find_leaks(server: Server) -> dict[str, int]:
    """Return what an idle server still holds of requests and steps."""

    def call(method: str) -> dict[str, Any]:
        response = server.client.post("/collective_rpc", json={"method": method})
        assert response.status_code == 200, response.text
        [result] = response.json()["results"]
        return dict(result)

    report, inside = call("step_report"), call("inside")
    held = {"blocks": inside["blocks"] - inside["free_blocks"], **inside["scheduler"], **report["in_use"]}
    held |= {name: count for name, count in inside["alive"].items() if count > MOST_ALIVE}
    held["step signatures after warm-up"] = len(report["graphs"]["unexpected"])
    return {name: count for name, count in held.items() if count}


@pytest.mark.parametrize(
    ("method", "number", "num_requests"),
    [
        *((*case, QUICK_REQUESTS) for case in QUICK),
        *(pytest.param(*case, NUM_REQUESTS, marks=pytest.mark.slow) for case in ALL),
    ],
)
def test_drafts_change_no_answer(
    method: str, number: int, num_requests: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    configuration = draw(method, f"{SEED}.{number}")
    wrong = []
    with serving(configuration, request, tmp_path / "log.txt") as (server, target):
        bodies = bodies_for(configuration, target, num_requests)
        judge = Judge(target, AutoConfig.from_pretrained(target).eos_token_id, MAX_LEN)
        together = ask_together(server, bodies)
        counts = {name: int(server.metric(f"vllm:{name}_total")) for name in COUNTERS}
        for index, (body, response) in enumerate(zip(bodies, together, strict=True)):
            faults = find_faults(judge, body, response)
            if is_promised(configuration, body):
                faults += compare_with_alone(server, judge, index, body, response)
            if faults:
                wrong.append(f"{configuration}, request {index}: {'; '.join(faults)}\n  {json.dumps(body)}")
        failed_audits = server.metric("gaudi_spec:audits_total", result="different")
        send_and_leave(server, bodies)
        server.wait_idle()
        # Records of the last steps stay until the next, and those had as many requests as left together.
        ask(server, {"prompt": [5, 6, 7], "max_tokens": 2})
        server.wait_idle()
        deadline = time.monotonic() + LEAK_SECONDS  # audits go on for a while
        while (leaks := find_leaks(server)) and time.monotonic() < deadline:
            time.sleep(1)
    statuses = Counter(response.status_code for response in together)
    print(
        f"{configuration}: {len(bodies)} requests, statuses {dict(statuses)}, {counts}; "
        f"{judge.tally.equal} answers equal, {judge.tally.ties} ties, {len(wrong)} requests differ"
    )
    assert not wrong, f"{len(wrong)} of {len(bodies)} requests\n" + "\n".join(wrong[:5])
    assert not failed_audits
    assert not leaks
    if len(bodies) == num_requests:
        assert all(counts.values()), f"the server was not under pressure: {counts}"
        assert statuses[200] > 0.9 * num_requests
