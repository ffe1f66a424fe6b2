"""A request says what it says alone, whoever is its neighbor: how many there are, who they are, when each came and who
left early, and however the scheduler cuts and interrupts them. (All requests of a batch at once: test_batching.py and
test_speculation_batching.py; random schedules of a model without weights: test_random_schedules.py.)"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests import heads
from tests.full_tests.engines import SMALL_KV, counter, engine, preemptions
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import accepted, ngram, speculating, suffix
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import KINDS, Answer, Request, answers, differences, mixed_requests, without_drafts

NUM_PROBES = len(KINDS)
CROWDS = (0, 1, 7, 31)
"""Neighbors of each probe."""
COUPLED = dict(draft_sample_method="coupled", rejection_sample_method="strict")


@dataclass(frozen=True)
class Way:
    """Of drafting. A fixture's name for the drafter's model, or none."""

    name: str
    method: str | None = None
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def target(self, request: pytest.FixtureRequest) -> str:
        return heads.target(self.method) if self.method in heads.METHODS else request.getfixturevalue("looping_llama")

    def config(self, request: pytest.FixtureRequest) -> dict[str, Any] | None:
        if self.method is None:
            return None
        if self.method in heads.METHODS:
            return heads.head(self.method, 4, **COUPLED)
        if self.method in ("ngram", "suffix"):
            return {"ngram": ngram, "suffix": suffix}[self.method](4)
        model = {"model": request.getfixturevalue(self.model)} if self.model else {}
        return dict(method=self.method, num_speculative_tokens=4, **model, **COUPLED)


RETOKENIZE = {"gaudi_spec": dict(universal_context="retokenize", universal_kv_len=512)}
WAYS = [
    Way("plain"),
    Way("draft_model", "draft_model", "looping_llama"),
    Way("map", "universal_draft", "twin"),
    Way("retokenize", "universal_draft", "twin", dict(additional_config=RETOKENIZE)),
    Way("eagle", "eagle"),
    Way("mtp", "mtp"),
    Way("ngram", "ngram"),
    Way("suffix", "suffix"),
]


@pytest.fixture(scope="module")
def probes() -> list[Request]:
    """One of each kind of sampling."""
    return mixed_requests(NUM_PROBES)


@pytest.fixture(scope="module")
def plain(probes: list[Request]) -> Any:
    return without_drafts(probes)


def neighbors(rng: random.Random, count: int) -> list[Request]:
    """Anybody: also without a seed, or with the beginning of a probe's prompt."""
    lengths = [rng.choice([rng.randint(1, 30), rng.randint(30, 300)]) for _ in range(count)]
    prompts = random_prompts(lengths, VOCAB, rng.getrandbits(32))
    kinds = [rng.choice([dict(temperature=0), dict(temperature=1.0), dict(temperature=0.8, top_k=9)]) for _ in prompts]
    return [
        Request("neighbor", prompt, SamplingParams(max_tokens=rng.randint(1, 24), **kind))
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]


def ask_among(llm: LLM, probes: list[Request], crowd: int, rng: random.Random) -> list[list[Answer]]:
    """Each probe and its neighbors, of whom about `crowd` run beside it: they come one by one while others run, in an
    order drawn anew, and every fourth neighbor leaves early. Without neighbors each probe runs alone."""
    core, done = llm.llm_engine, {}
    waiting: list[tuple[str, Request]] = []
    for place in rng.sample(range(len(probes)), len(probes)):
        group = [(f"probe {place}", probes[place])]
        group += [(f"neighbor {place} {n}", request) for n, request in enumerate(neighbors(rng, -(-crowd // 4)))]
        waiting += rng.sample(group, len(group))
    leaving: dict[str, int] = {}

    def step() -> None:
        for output in core.step():
            if output.finished:
                done[output.request_id] = output
        for name in [name for name in leaving if name in done or leaving[name] == 0]:
            del leaving[name]
            if name not in done:
                core.abort_request([name])
        for name in leaving:
            leaving[name] -= 1

    for name, request in waiting:
        core.add_request(name, {"prompt_token_ids": request.prompt}, request.params)
        if name.startswith("neighbor") and rng.random() < 0.25:
            leaving[name] = rng.randint(0, 6)
        while core.get_num_unfinished_requests() > crowd:
            step()
    while core.has_unfinished_requests():
        step()
    return answers([done[f"probe {place}"] for place in range(len(probes))])


@pytest.mark.slow  # adversary/test_adversary.py compares with alone too
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_neighbors_do_not_matter(way: Way, probes: list[Request], plain: Any, request: pytest.FixtureRequest) -> None:
    """Memory for two of the longest requests, prompts in chunks, a prefix cache that the rounds before have filled."""
    target, config, rng = way.target(request), way.config(request), random.Random(0)
    expected = plain(target)
    kv_bytes = SMALL_KV["kv_cache_memory_bytes"] * (2 if way.model and not way.options else 1)
    options = SMALL_KV | dict(kv_cache_memory_bytes=kv_bytes, max_num_batched_tokens=128) | way.options
    with speculating(target, config, **options) if config else engine(target, **options) as llm:
        for crowd in CROWDS:
            different = differences(probes, ask_among(llm, probes, crowd, rng), expected)
            assert not different, f"with {crowd} neighbors {len(different)} differ\n" + "\n".join(different[:5])
        assert preemptions(llm) > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        if config:
            assert accepted(llm) > 50
        llm.llm_engine.step()  # the worker hears of an end with the next step
        in_use = llm.collective_rpc("step_report")[0]["in_use"]
        assert not any(in_use.values()), in_use
