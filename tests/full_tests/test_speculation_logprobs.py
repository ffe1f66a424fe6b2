"""Log-probabilities with speculation are those without, for every token of a run of accepted drafts: of the prompt, of
the sampled token, of the best ones, and of the whole vocabulary."""

from typing import Any

import pytest

from tests.full_tests.drafters import Record, play
from tests.full_tests.prompts import THINKING, random_prompts, thinking_requests
from tests.full_tests.speculation import custom
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.upstream_reference import collect, compare

CLOSE = 1e-4
K = 4
GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED: dict[str, Any] = dict(temperature=0.8, top_p=0.95, seed=3, max_tokens=40, ignore_eos=True)
CASES: list[dict[str, Any]] = [
    GREEDY | dict(logprobs=0),
    GREEDY | dict(logprobs=5),
    GREEDY | dict(logprobs=-1, max_tokens=12),
    GREEDY | dict(logprobs=2, logprob_token_ids=[5, 77]),
    GREEDY | dict(prompt_logprobs=3, logprobs=1),
    GREEDY | dict(logprobs=3, presence_penalty=1.0, frequency_penalty=0.5),
    GREEDY | dict(logprobs=3, repetition_penalty=1.3, logit_bias={5: 3.0, 77: 2.5}),
    GREEDY | dict(logprobs=2, bad_words=["the", " a", "e"]),
    GREEDY | dict(logprobs=2, allowed_token_ids=list(range(20, 90))),
    SEEDED | dict(logprobs=4),
    SEEDED | dict(logprobs=4, top_k=20, min_p=0.02, frequency_penalty=0.7),
    SEEDED | dict(logprobs=2, logit_bias={5: 3.0, 9: -100.0}),
    GREEDY,
]
LENGTHS = [6, 40, 130]


@pytest.mark.parametrize("chunks", [dict(max_num_batched_tokens=64), pytest.param({}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["raw_logprobs", pytest.param("processed_logits", marks=pytest.mark.slow)])
def test_logprobs_equal_those_without_speculation(mode: str, chunks: dict[str, int], tiny_llama: str) -> None:
    requests = [
        (prompt, case) for index, case in enumerate(CASES) for prompt in random_prompts(LENGTHS, VOCAB, seed=index)
    ]
    requests += thinking_requests([GREEDY | dict(logprobs=2), SEEDED], LENGTHS)
    options: dict[str, Any] = dict(
        max_logprobs=-1, logprobs_mode=mode, enable_prefix_caching=False, reasoning_config=THINKING, **chunks
    )
    job: dict[str, Any] = dict(model=tiny_llama, options=options, requests=requests)
    expected = collect(job)
    # A drafter that knows what comes and leaves out a step now and then: runs of every length.
    record = Record.of([prompt for prompt, _ in requests], [result["tokens"] for result in expected])
    script = play(lambda context, k: record.next_if_known(context, len(context) % (k + 1)))
    ours = collect(job | dict(options=options | dict(speculative_config=custom("Scripted", K))))
    assert sum(len(drafts) for _, drafts in script.rows()) > 500
    check(requests, ours, expected)


def check(requests: list[Any], ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    wrong: list[str] = []
    for (prompt, params), one, other in zip(requests, ours, expected, strict=True):
        name = f"{params}, prompt of {len(prompt)}"
        if one["tokens"] != other["tokens"]:
            wrong.append(f"{name}: tokens {one['tokens']} for {other['tokens']}")
            continue
        assert len(one["output"]) == (len(one["tokens"]) if "logprobs" in params else 0)
        for part in ("output", "prompt"):
            wrong += compare(f"{name}, {part}", one[part], other[part], CLOSE)
    assert not wrong, f"{len(wrong)} differences\n" + "\n".join(wrong[:20])
