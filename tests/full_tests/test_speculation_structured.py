"""Structured output with drafts: those that break the grammar are trimmed before they are verified."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.full_tests import drafters
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.heads import head, target
from tests.full_tests.prompts import random_prompts
from tests.full_tests.server import Server
from tests.full_tests.speculation import accepted, account, custom, ngram, speculating
from tests.full_tests.structured import NUMBER, ask_mixed, check_ended, matches
from tests.full_tests.tiny_models import VOCAB
from tests.support.marks import quick_and_slow


def test_drafts_that_break_the_grammar_are_trimmed(tiny_llama: str) -> None:
    """Right drafts up to some place and nonsense behind it: only the right ones are verified and counted."""
    constraint = StructuredOutputsParams(regex=NUMBER)
    prompts = random_prompts([5 + i for i in range(16)], VOCAB)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=64, structured_outputs=constraint)
        for i in range(len(prompts))
    ]
    with engine(tiny_llama) as llm:
        expected = first_tokens(generate(llm, prompts, params))
    record = drafters.Record.of(prompts, expected)

    def write(context: list[int], k: int) -> list[int]:
        right = record.next_if_known(context, len(context) % k)
        return right + [2] * (k - len(right))  # a token that the grammar never takes

    script = drafters.play(write)
    with speculating(tiny_llama, custom("Scripted", 4)) as llm:
        outputs = generate(llm, prompts, params)
        tokenizer = llm.get_tokenizer()
    assert first_tokens(outputs) == expected
    drafted = accepted = 0
    for output in outputs:
        if output.outputs[0].finish_reason == "stop":
            # Not the text: it may begin with what was left of a letter at the prompt's end.
            matches(NUMBER)(tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True))
        steps = account(output)
        assert steps.drafted == steps.accepted
        drafted, accepted = drafted + sum(steps.drafted), accepted + sum(steps.accepted)
    assert accepted > 50
    assert sum(len(drafts) for _, drafts in script.rows()) > drafted + 50


@pytest.mark.parametrize("config", [None, ngram(3)], ids=["plain", "drafts"])
def test_min_tokens_yield_to_a_grammar(config: dict[str, Any] | None, tiny_llama: str) -> None:
    """A grammar that is complete before as many tokens are out leaves nothing but the end, as in vLLM."""
    params = [
        SamplingParams(
            temperature=0.8 * number,
            seed=number,
            max_tokens=32,
            min_tokens=12,
            structured_outputs=StructuredOutputsParams(choice=["yes"]),
        )
        for number in range(2)
    ]
    with engine(tiny_llama, speculative_config=config) as llm:
        outputs, tokenizer = generate(llm, random_prompts([5, 9], VOCAB), params), llm.get_tokenizer()
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        assert tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) == "yes"


@pytest.mark.parametrize("method", quick_and_slow(["mtp"], ("eagle3", "dflash")))
def test_drafts_of_heads_change_no_structured_output(method: str) -> None:
    model = target(method)
    with engine(model) as llm:
        expected = ask_mixed(llm, model, 12)
    with speculating(model, head(method, 3)) as llm:
        outputs = ask_mixed(llm, model, 12)
        assert first_tokens(outputs) == first_tokens(expected)
        assert sum(check_ended(outputs).values()) > 2
        assert accepted(llm) > 20


# The tiny model would fill JSON with blanks.
COMPACT = ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.slow
def test_tool_calls_with_mtp_are_those_of_no_drafts(tmp_path: Path) -> None:
    """Elsewhere MTP broke them (vllm#25993)."""
    choices: list[Any] = [{"type": "function", "function": {"name": "weather"}}, "required", "auto"]
    bodies: list[dict[str, Any]] = [
        dict(
            messages=[{"role": "user", "content": "The weather?"}],
            tools=[TOOL],
            tool_choice=choices[index % 3],
            temperature=index % 2,
            seed=index,
            max_tokens=80,
        )
        for index in range(6)
    ]
    drafts = ("--speculative-config", json.dumps(head("mtp", 3)))
    answers = []
    for options in ((), drafts):
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "512", *COMPACT)
        with Server(target("mtp"), tmp_path / "log.txt", *tools, *options) as server:
            said = [server.post("/v1/chat/completions", body)["choices"][0]["message"] for body in bodies]
            calls = [[call["function"] for call in message.get("tool_calls") or ()] for message in said]
            answers.append([(message["content"], called) for message, called in zip(said, calls, strict=True)])
            if options:
                assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 20
    assert answers[0] == answers[1]
    assert {call["name"] for _, calls in answers[0] for call in calls} == {"weather"}


@pytest.mark.slow
def test_reasoning_is_separated(demo_model: str, tmp_path: Path) -> None:
    """The grammar makes the model write what the parser splits."""
    grammars = {"backend": "xgrammar", "enable_in_reasoning": True}
    options = ["--reasoning-parser", "olmo3", "--structured-outputs-config", json.dumps(grammars)]
    options += ["--max-model-len", "512", "--speculative-config", json.dumps(ngram(3))]
    with Server(demo_model, tmp_path / "log.txt", *options) as server:
        body = dict(messages=[{"role": "user", "content": "The quick brown fox"}], temperature=0, max_tokens=60)
        constraint = {"regex": "<think>[a-z]{3,6}</think>[a-z]{3,6}"}
        answer = server.post("/v1/chat/completions", body | dict(structured_outputs=constraint))
        message = answer["choices"][0]["message"]
    assert message["reasoning"].isalpha()
    assert message["content"].isalpha()
