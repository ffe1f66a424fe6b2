"""Who drafts is decided row by row: by the drafter's maximum length, by the request's own wish and by the load. A row
that does not draft changes nothing for the others in its batch."""

import random
from typing import Any

import pytest
from vllm import SamplingParams

from tests.full_tests import drafters
from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import Account, account, custom, ngram, speculating, suffix
from tests.full_tests.tiny_models import VOCAB

LIMIT = 64
CONTEXTS = [20, 60, 100, 200]


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def repeating(length: int, seed: int) -> list[int]:
    return (random_prompts([5], VOCAB, seed)[0] * length)[:length]


@pytest.mark.parametrize("method", [ngram, suffix])
def test_long_rows_do_not_draft(method: Any, tiny_llama: str) -> None:
    prompts = [repeating(length, seed=length) for length in CONTEXTS]
    params = greedy(40)
    with engine(tiny_llama) as llm:
        expected = first_tokens(generate(llm, prompts, params))
    # No tree of earlier requests: what a row drafts is to depend on that row alone.
    options = dict(suffix_decoding_max_cached_requests=0) if method is suffix else {}
    with speculating(tiny_llama, method(4, max_model_len=LIMIT, **options), enable_prefix_caching=False) as llm:
        together = generate(llm, prompts, params)
        alone = [generate(llm, [prompt], params)[0] for prompt in prompts]
    assert first_tokens(together) == first_tokens(alone) == expected
    steps = [account(output) for output in together]
    assert steps == [account(output) for output in alone]
    assert sum(steps[0].drafted) > (10 if method is ngram else 3)  # a suffix tree is choosy
    assert sum(steps[0].accepted) > 0
    # 61 tokens with the first one: three drafts and then two fit below the limit, if nothing is accepted.
    assert sum(steps[1].drafted) <= 3 + 2 + 1
    assert not any(steps[2].drafted)
    assert not any(steps[3].drafted)


@pytest.mark.parametrize("k", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("right", [False, True], ids=["never-right", "always-right"])
def test_lengths_around_the_limit(right: bool, k: int, tiny_llama: str) -> None:
    """No drafter sees a context that leaves no room, and no draft lies at or past the limit."""
    lengths = list(range(LIMIT - k - 3, LIMIT + 3)) * 3
    random.Random(0).shuffle(lengths)
    prompts, num_tokens = random_prompts(lengths, VOCAB), 3 * k + 8
    with engine(tiny_llama) as llm:
        expected = first_tokens(generate(llm, prompts, greedy(num_tokens + k)))
    record = drafters.Record.of(prompts, expected)

    def write(context: list[int], k: int) -> list[int]:
        truth = record.next(context, k)
        return truth if right else [(token + 1) % VOCAB for token in truth]

    script = drafters.play(write)
    with speculating(tiny_llama, custom("Scripted", k, max_model_len=LIMIT)) as llm:
        outputs = generate(llm, prompts, greedy(num_tokens))
    assert first_tokens(outputs) == [output[:num_tokens] for output in expected]
    assert all(script.calls), "a call without rows"
    assert all(len(context) < LIMIT for context, _ in script.rows())
    for prompt, output in zip(prompts, outputs, strict=True):
        drafted, accepted = account(output)
        length, wanted = len(prompt) + 1, []
        while length < LIMIT:
            # Never more than fits, and never fewer: only the end of the request, far away here, could want fewer.
            wanted.append(min(k, LIMIT - length))
            length += 1 + right * wanted[-1]
        assert drafted == wanted, f"prompt of {len(prompt)}"
        assert accepted == (wanted if right else [0] * len(wanted))


def test_each_row_its_own_number(tiny_llama: str) -> None:
    """A request may lower the number of its drafts, or ask for none."""
    prompts, wishes = random_prompts([30] * 6, VOCAB), [None, 0, 1, 2, 9, 0]
    with engine(tiny_llama) as llm:
        expected = first_tokens(generate(llm, prompts, greedy(40)))
    script = drafters.play(drafters.Record.of(prompts, expected).next)
    params = [greedy(32, extra_args=None if wish is None else {"num_speculative_tokens": wish}) for wish in wishes]
    with speculating(tiny_llama, custom("Scripted", 4)) as llm:
        outputs = generate(llm, prompts, params)
        steps = [account(output) for output in outputs]
        num_calls = len(script.calls)
        generate(llm, prompts[1:2], params[1])
        assert len(script.calls) == num_calls, "nobody wants a draft, and yet the drafter was called"
    assert first_tokens(outputs) == [output[:32] for output in expected]
    for wish, (drafted, accepted) in zip(wishes, steps, strict=True):
        assert accepted == drafted
        assert max(drafted, default=0) == min(4 if wish is None else wish, 4)


def test_opting_out_leaves_the_others_alone(tiny_llama: str) -> None:
    prompts = [repeating(length, seed=length) for length in (20, 25, 30, 35)]
    out = greedy(40, extra_args={"num_speculative_tokens": 0})
    with speculating(tiny_llama, ngram(4), enable_prefix_caching=False) as llm:
        alone = [account(generate(llm, [prompt], greedy(40))[0]) for prompt in prompts]
        mixed = [account(o) for o in generate(llm, prompts, [greedy(40), out, greedy(40), out])]
    assert mixed[0::2] == alone[0::2]
    assert all(sum(steps.drafted) > 10 for steps in alone)
    assert not any(sum(steps.drafted) for steps in mixed[1::2])


def test_schedule_by_load(tiny_llama: str) -> None:
    """Up to two requests at a time draft four tokens each, more of them none; when the crowd is gone, the rest do."""
    prompts, lengths = random_prompts([20, 21, 22, 23], VOCAB), [8, 8, 60, 60]
    with engine(tiny_llama) as llm:
        expected = first_tokens(generate(llm, prompts, greedy(70)))
    script = drafters.play(drafters.Record.of(prompts, expected).next)
    config = custom("Scripted", 4, num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 64, 0]])
    with speculating(tiny_llama, config) as llm:
        outputs = generate(llm, prompts, [greedy(length) for length in lengths])
        steps: list[Account] = [account(output) for output in outputs]
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") == sum(sum(s.drafted) for s in steps)
    assert first_tokens(outputs) == [output[:length] for output, length in zip(expected, lengths, strict=True)]
    assert not any(steps[0].drafted)
    assert not any(steps[1].drafted)
    for drafted, accepted in steps[2:]:
        assert max(drafted) == 4
        assert sum(drafted) > 30
        assert accepted == drafted
    assert max(len(call) for call in script.calls) <= 2
