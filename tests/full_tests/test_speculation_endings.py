"""A request ends where it would have ended without speculation, also when that is inside a run of accepted drafts.

The drafter knows what comes, so that every step accepts all of its drafts, and each kind of ending is tried at every
place of such a run."""

import re
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests import drafters
from tests.full_tests.drafters import Record, Script
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import accounts, custom, ngram, speculating, suffix
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import Request, answers, differences, run_together

K = 5
PLACES = range(16, 16 + 2 * (K + 1))
PROMPTS = random_prompts([10 + 3 * (i % 7) for i in PLACES], VOCAB)
MAX_LEN = 128
OPTIONS = dict(max_model_len=MAX_LEN)
LONG: dict[str, Any] = dict(temperature=0, max_tokens=MAX_LEN, ignore_eos=True)
# Makes the tiny model end by itself now and then.
ENDING = {1: 5.5}


@pytest.fixture(scope="module")
def record(looping_llama: str) -> Record:
    """What the target says to each prompt until its context is full."""
    with engine(looping_llama, **OPTIONS) as llm:
        return Record.of(PROMPTS, first_tokens(generate(llm, PROMPTS, SamplingParams(**LONG))))


def endings(record: Record, llm: LLM) -> dict[str, list[SamplingParams]]:
    """One request per prompt and kind of ending. Prompt i is to end after PLACES[i] tokens, as far as that is up to
    the parameters: a token or a text may have come up before."""
    tokenizer = llm.get_tokenizer()
    outputs = [text[len(prompt) :] for text, prompt in zip(record.texts, PROMPTS, strict=True)]
    ends: dict[str, list[SamplingParams]] = {name: [] for name in KINDS}
    for place, output in zip(PLACES, outputs, strict=True):
        last = output[place - 1]
        text = re.findall(r"[!-~]{1,2}", tokenizer.decode(output[:place]))[-1]
        kinds: dict[str, dict[str, Any]] = {
            "max_tokens": dict(max_tokens=place),
            "stop_token": dict(stop_token_ids=[last]),
            "stop_token_after_min_tokens": dict(stop_token_ids=[last], min_tokens=place - 2),
            "stop_string": dict(stop=[text]),
            "stop_string_kept": dict(stop=[text], include_stop_str_in_output=True, min_tokens=9),
            "context": {},
        }
        for name, kind in kinds.items():
            ends[name].append(SamplingParams(**(LONG | kind)))
    return ends


KINDS = ["max_tokens", "stop_token", "stop_token_after_min_tokens", "stop_string", "stop_string_kept", "context"]


@pytest.mark.parametrize("kind", ["oracle", *(pytest.param(m, marks=pytest.mark.slow) for m in ("ngram", "suffix"))])
def test_endings(kind: str, looping_llama: str, record: Record) -> None:
    with engine(looping_llama, **OPTIONS) as llm:
        ends = endings(record, llm)
        expected = {name: answers(generate(llm, PROMPTS, params)) for name, params in ends.items()}
    reasons = {name: {answer.finish_reason for [answer] in found} for name, found in expected.items()}
    for name in KINDS:
        assert reasons[name] >= {"length" if name in ("max_tokens", "context") else "stop"}

    script = drafters.play(record.next_if_known)
    config = {"oracle": custom("Scripted", K), "ngram": ngram(K), "suffix": suffix(K)}[kind]
    num_accepted = 0
    with speculating(looping_llama, config, **OPTIONS) as llm:
        for name, params in ends.items():
            outputs = generate(llm, PROMPTS, params)
            requests = [Request(name, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
            different = differences(requests, answers(outputs), expected[name])
            assert not different, f"{len(different)} of {len(PROMPTS)} differ\n" + "\n".join(different[:5])
            num_accepted += sum(sum(steps.accepted) for steps in accounts(outputs))
            if kind == "oracle" and name.startswith("stop"):
                check_run_was_cut(script, outputs)
            script.calls.clear()
    assert num_accepted > 50


def check_run_was_cut(script: Script, outputs: list[Any]) -> None:
    """That some answers end before what their last step had for them. A runner that knows max_tokens may draft no more
    than it needs; stops it cannot foresee."""
    cut = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        calls = [(len(seen), len(drafts)) for seen, drafts in script.rows() if list(seen[: len(prompt)]) == prompt]
        length, drafted = max(calls)
        cut += length + drafted + 1 > len(prompt) + len(output.outputs[0].token_ids)
    assert cut > len(PROMPTS) // 3


def test_eos_inside_a_run(tiny_llama: str) -> None:
    """The end token comes up by itself, with and without a least number of tokens, and is drafted like any other."""
    prompts = random_prompts([5 + i for i in range(40)], VOCAB, seed=3)
    params = [
        SamplingParams(temperature=0, max_tokens=80, min_tokens=20 * (i % 2), logit_bias=ENDING)
        for i in range(len(prompts))
    ]
    past_it = [SamplingParams(temperature=0, max_tokens=80 + K, ignore_eos=True, logit_bias=ENDING) for _ in prompts]
    requests = [Request("eos", prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    with engine(tiny_llama) as llm:
        expected = run_together(llm, requests)
        free = first_tokens(generate(llm, prompts, past_it))
    ended = [answer for [answer] in expected if answer.finish_reason == "stop"]
    assert len({len(answer.token_ids) % (K + 1) for answer in ended}) > K // 2, "they should end at several places"

    # Under min_tokens the end token is masked, and the target goes another way than in the record.
    drafters.play(Record.of(prompts, free).next_if_known)
    with speculating(tiny_llama, custom("Scripted", K)) as llm:
        outputs = generate(llm, prompts, params)
    different = differences(requests, answers(outputs), expected)
    assert not different, f"{len(different)} of {len(prompts)} differ\n" + "\n".join(different[:5])
    assert any(any(steps.accepted) for steps in accounts(outputs))
