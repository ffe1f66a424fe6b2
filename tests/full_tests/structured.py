"""Requests with structured output of every kind, and whether what came out parses."""

import json
import re
from collections.abc import Callable
from typing import Any

from jsonschema import validate
from transformers import AutoTokenizer
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.full_tests.engines import generate
from tests.full_tests.prompts import PROMPTS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
NUMBER = r"[1-9][0-9]{2}-[0-9]{4}(; (yes|no|日本)){1,3}"
CHOICES = ["positive", "negative", "neither of the two"]
GRAMMAR = """
root ::= "SELECT " column (", " column)? " FROM " table ";"
column ::= "id" | "name" | "age"
table ::= "users" | "orders"
"""
STATEMENT = r"SELECT (id|name|age)(, (id|name|age))? FROM (users|orders);"


def parses_as_schema(text: str) -> None:
    # xgrammar lets control characters into strings of bounded length.
    validate(json.loads(text, strict=False), SCHEMA)


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "json": (dict(json=SCHEMA), parses_as_schema),
    "json_object": (dict(json_object=True), json.loads),
    "regex": (dict(regex=NUMBER), matches(NUMBER)),
    "choice": (dict(choice=CHOICES), matches("|".join(CHOICES))),
    "grammar": (dict(grammar=GRAMMAR), matches(STATEMENT)),
}


def ask_mixed(llm: LLM, model: str, count: int) -> list[RequestOutput]:
    """Every kind in turn, greedy and sampled, an unconstrained request after each round."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts, params = [], []
    for index, kind in enumerate(kinds(count)):
        prompts.append(tokenizer.encode(PROMPTS[index % len(PROMPTS)]))
        constraint = StructuredOutputsParams(**KINDS[kind][0]) if kind else None
        temperature = (0.0, 0.7, 1.3)[index % 3]
        params.append(SamplingParams(temperature=temperature, seed=index, max_tokens=96, structured_outputs=constraint))
    return generate(llm, prompts, params)


def kinds(count: int) -> list[str | None]:
    names = [*KINDS, None]
    return [names[index % len(names)] for index in range(count)]


def check_ended(outputs: list[RequestOutput]) -> dict[str, int]:
    """Whatever ended by itself parses. Returns how many did, by kind."""
    ended = dict.fromkeys(KINDS, 0)
    for kind, output in zip(kinds(len(outputs)), outputs, strict=True):
        completion = output.outputs[0]
        # vLLM ends a request with an error when a token breaks its grammar, so that would not show below.
        assert completion.finish_reason in ("stop", "length"), completion
        if kind and completion.finish_reason == "stop":
            KINDS[kind][1](completion.text)
            ended[kind] += 1
        elif kind == "choice":
            raise AssertionError(f"a choice needs few tokens and should end: {completion}")
    return ended
