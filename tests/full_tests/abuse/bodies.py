"""Completion requests at the edges of what vLLM documents, and beyond: all endpoints make these sampling parameters."""

from typing import Any

from hypothesis import strategies as st

NOTABLE_INTEGERS = [-(2**63) - 1, -(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 255, 399, 400, 401, 511, 512, 513]
NOTABLE_INTEGERS += [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30]
NOTABLE_NUMBERS = [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e-300, 0.5, 1.0, 1.5, 2.0, 1e30, 1e308]
NOTABLE_TEXTS = ["", " ", "\n", "\0", "\ud800", "\ufeff", "é" * 3, "\U0010ffff", "a" * 2000, "<s>", "</s>", "{{7*7}}"]

integers = st.sampled_from(NOTABLE_INTEGERS)
numbers = st.one_of(st.sampled_from(NOTABLE_NUMBERS), integers)
texts = st.one_of(st.sampled_from(NOTABLE_TEXTS), st.text(st.characters(exclude_categories=[]), max_size=20))
token_ids = st.one_of(st.integers(0, 399), integers)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)

prompts = st.one_of(
    st.just("The quick brown fox"),
    texts,
    st.lists(token_ids, max_size=8),
    st.lists(st.integers(0, 399), min_size=1, max_size=40),
    st.lists(st.one_of(texts, st.lists(token_ids, max_size=4)), max_size=3),
    st.just([7] * 511),
)

schemas = st.one_of(
    st.sampled_from(
        [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "string", "pattern": "(a+)+$"},
            {"type": "array", "items": {"$ref": "#"}},
            {"$ref": "#/nowhere"},
            {"enum": []},
            {"type": "integer", "minimum": 5, "maximum": 1},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            {"type": "string", "minLength": 10**9},
            True,
            False,
        ]
    ),
    anything,
)
regexes = st.one_of(
    st.sampled_from(["[0-9]+", "(", "a{1000000}", "(a|b)*c", "\\p{L}+", "(?=a)b", "\\1", "[^\\x00-\\x7f]+", ""]), texts
)
grammars = st.one_of(st.sampled_from(['root ::= "a"', "root ::= root", "root ::= (", 'root ::= ""', "x ::= y"]), texts)
constraints = st.one_of(
    st.builds(dict, json=schemas),
    st.builds(dict, regex=regexes),
    st.builds(dict, grammar=grammars),
    st.builds(dict, choice=st.lists(texts, max_size=4)),
    st.builds(dict, json_object=st.booleans()),
    st.builds(dict, structural_tag=st.one_of(texts, st.just('{"type": "structural_tag", "format": {}}'))),
    st.builds(dict, regex=regexes, choice=st.lists(texts, max_size=2)),
)


def _each(names: str, kind: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    return dict.fromkeys(names.split(), kind)


SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    **_each("temperature top_p min_p presence_penalty frequency_penalty repetition_penalty length_penalty", numbers),
    **_each(
        "top_k seed best_of prompt_logprobs min_tokens truncate_prompt_tokens stream_interval priority "
        "thinking_token_budget",
        integers,
    ),
    **_each(
        "use_beam_search ignore_eos include_stop_str_in_output skip_special_tokens spaces_between_special_tokens "
        "add_special_tokens return_token_ids return_tokens_as_token_ids stream watermarking",
        st.booleans(),
    ),
    **_each("request_id cache_salt user", texts),
    **_each("repetition_detection kv_transfer_params extra_args stream_options", anything),
    "n": st.one_of(integers, st.integers(1, 4)),
    "logit_bias": st.one_of(
        st.dictionaries(st.integers(0, 399).map(str), numbers, max_size=6),
        st.dictionaries(st.one_of(integers.map(str), texts), numbers, max_size=3),
    ),
    "stop": st.one_of(texts, st.lists(texts, max_size=6)),
    "stop_token_ids": st.lists(token_ids, max_size=4),
    "bad_words": st.lists(texts, max_size=4),
    "allowed_token_ids": st.lists(token_ids, max_size=6),
    "logprob_token_ids": st.lists(token_ids, max_size=4),
    "structured_outputs": constraints,
    "vllm_xargs": st.one_of(
        st.builds(dict, num_speculative_tokens=st.one_of(numbers, texts, st.lists(numbers, max_size=2), anything)),
        st.dictionaries(texts, st.one_of(numbers, texts), max_size=3),
    ),
}
_COMPLETION = {
    **_each("logprobs max_tokens", integers),
    **_each("echo", st.booleans()),
    **_each("suffix prompt_embeds", texts),
}


def _some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Up to five of the fields: of more, one is nearly always refused, and the others are never looked at."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


completions = st.builds(
    lambda prompt, fields: dict(max_tokens=6, prompt=prompt) | fields, prompts, _some_of(SAMPLING | _COMPLETION)
)
