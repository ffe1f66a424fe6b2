"""Every sampling parameter means what it means upstream: requests without chance get the tokens and log-probabilities
that upstream's CPU platform gives, all in one batch."""

from pathlib import Path
from typing import Any

from tests.full_tests.prompts import THINKING, random_prompts, thinking_requests
from tests.full_tests.tiny_models import VOCAB, byte_tokenizer
from tests.full_tests.upstream_reference import collect, compare, upstream

GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=40)
# At a temperature, but with a filter that leaves one candidate.
CERTAIN: dict[str, Any] = dict(temperature=1.0, max_tokens=40)
PARAMS: list[dict[str, Any]] = [
    GREEDY,
    GREEDY | dict(ignore_eos=True),
    GREEDY | dict(presence_penalty=2.0),
    GREEDY | dict(frequency_penalty=0.7, ignore_eos=True),
    GREEDY | dict(frequency_penalty=-1.5, ignore_eos=True),
    GREEDY | dict(repetition_penalty=1.6, ignore_eos=True),
    GREEDY | dict(repetition_penalty=0.7, presence_penalty=-0.5, frequency_penalty=0.2, ignore_eos=True),
    GREEDY | dict(logit_bias={5: 3.0, 9: -100.0, 77: 2.5, 120: 3.5}, ignore_eos=True),
    GREEDY | dict(allowed_token_ids=list(range(20, 90)), ignore_eos=True),
    GREEDY | dict(allowed_token_ids=[1, 30, 31, 32], min_tokens=9),
    GREEDY | dict(logit_bias={1: 20.0}, min_tokens=7),
    GREEDY | dict(stop_token_ids=list(range(40, 80)), min_tokens=5),
    GREEDY | dict(stop_token_ids=list(range(40, 80)), include_stop_str_in_output=True),
    GREEDY | dict(stop=["e", "th"], ignore_eos=True),
    GREEDY | dict(stop=["a", "o"], include_stop_str_in_output=True, min_tokens=4, ignore_eos=True),
    GREEDY | dict(bad_words=["the", " a", "e", "compile", "ab"], ignore_eos=True),
    GREEDY | dict(bad_words=["shape"], repetition_penalty=1.2, logit_bias={3: 2.0}, min_tokens=3),
    CERTAIN | dict(top_k=1, ignore_eos=True),
    CERTAIN | dict(min_p=1.0, ignore_eos=True, presence_penalty=1.0),
    CERTAIN | dict(top_p=1e-6, ignore_eos=True, logit_bias={8: 4.0}),
]
LOGPROBS: list[dict[str, Any]] = [
    dict(logprobs=0, max_tokens=16),
    dict(logprobs=5, max_tokens=16),
    dict(logprobs=-1, max_tokens=1),
    dict(prompt_logprobs=0, max_tokens=1),
    dict(prompt_logprobs=5, logprobs=2, max_tokens=4),
    # These log-probabilities are those of the raw logits, before the sampler edits them.
    dict(logprobs=3, max_tokens=12, logit_bias={20: 30.0}, presence_penalty=1.0),
]
LENGTHS = [4, 40, 130]
CLOSE = 1e-3


def test_sampling_parameters_equal_upstream(tiny_llama: str, tmp_path: Path) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    requests = [(prompt, params) for params in PARAMS for prompt in prompts]
    requests += thinking_requests([GREEDY, GREEDY | dict(logit_bias={5: 3.0}), CERTAIN | dict(top_k=1)], LENGTHS)
    requests += [(prompt, GREEDY | dict(ignore_eos=True) | case) for case in LOGPROBS for prompt in prompts]
    requests.append(([5, 6], GREEDY | dict(max_tokens=1, prompt_logprobs=1)))  # one of two tokens is scored
    # Chunks cut the longest prompt, whose log-probabilities then come from several steps.
    options = dict(max_logprobs=-1, max_num_batched_tokens=64, enable_prefix_caching=False)
    job = dict(model=tiny_llama, options=options | dict(reasoning_config=THINKING), requests=requests)
    theirs, ours = upstream(job, tmp_path), collect(job)
    wrong: list[str] = []
    for (prompt, params), one, other in zip(requests, ours, theirs, strict=True):
        name = f"{params}, prompt of {len(prompt)}"
        wrong += [
            f"{name}:\n  {one[key]}\n  {other[key]}" for key in ("tokens", "text", "ended") if one[key] != other[key]
        ]
        for part in ("output", "prompt"):
            wrong += compare(f"{name}, {part}", one[part], other[part], CLOSE)
        if other["cumulative"] is not None and abs(one["cumulative"] - other["cumulative"]) > 16 * CLOSE:
            wrong.append(f"{name}: cumulative {one['cumulative']} for {other['cumulative']}")
    assert not wrong, f"{len(wrong)} of {len(requests)} differ\n" + "\n".join(wrong)
    end = byte_tokenizer().encode(THINKING["reasoning_end_str"], add_special_tokens=False)
    for (_, params), answer in zip(requests, ours, strict=True):
        if (budget := params.get("thinking_token_budget")) is not None:
            assert answer["tokens"][budget : budget + len(end)] == end
    # A parameter that changes nothing for any prompt would not be tested.
    plain = [answer["tokens"] for answer in theirs[len(LENGTHS) : 2 * len(LENGTHS)]]
    for index, params in enumerate(PARAMS):
        answers = [answer["tokens"] for answer in theirs[index * len(LENGTHS) : (index + 1) * len(LENGTHS)]]
        assert answers != plain or params in (PARAMS[0], PARAMS[1], PARAMS[-3]), f"{params} makes no difference"
