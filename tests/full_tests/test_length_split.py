"""Who drafts is decided row by row: by the drafter's maximum length, by the request's own wish and by the load. A row
that does not draft changes nothing for the others in its batch."""

import random
from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams

from tests.full_tests import drafters
from tests.full_tests.drafters import Record
from tests.full_tests.engines import counter, engine, first_tokens, generate, preemptions
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import Account, account, custom, ngram, speculating, suffix
from tests.full_tests.tiny_models import VOCAB
from tests.support.marks import quick_and_slow

LIMIT = 64
MOST_DRAFTS = 8
NUM_TOKENS = 70


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


CONTEXTS = [(random_prompts([5], VOCAB, seed=length)[0] * length)[:length] for length in (20, 60, 100, 200)]
AROUND = random_prompts([*range(LIMIT - MOST_DRAFTS - 3, LIMIT + 3)] * 3, VOCAB)
SIX = random_prompts([20, 21, 22, 23, 24, 25], VOCAB, seed=1)
random.Random(0).shuffle(AROUND)


@pytest.fixture(scope="module")
def said(tiny_llama: str) -> Record:
    """What the target says to each of the prompts, without speculation."""
    prompts = [*CONTEXTS, *AROUND, *SIX]
    with engine(tiny_llama) as llm:
        return Record.of(prompts, first_tokens(generate(llm, prompts, greedy(NUM_TOKENS))))


def check(outputs: list[RequestOutput], said: Record) -> None:
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        assert tokens == said.next(list(output.prompt_token_ids), len(tokens))


@pytest.mark.parametrize("method", [ngram, pytest.param(suffix, marks=pytest.mark.slow)])
def test_rows_beyond_the_drafter_limit_do_not_draft(method: Any, tiny_llama: str, said: Record) -> None:
    params = greedy(40)
    # No tree of earlier requests: what a row drafts is to depend on that row alone.
    options = dict(suffix_decoding_max_cached_requests=0) if method is suffix else {}
    with speculating(tiny_llama, method(4, max_model_len=LIMIT, **options), enable_prefix_caching=False) as llm:
        together = generate(llm, CONTEXTS, params)
        alone = [generate(llm, [prompt], params)[0] for prompt in CONTEXTS]
    check([*together, *alone], said)
    steps = [account(output) for output in together]
    assert steps == [account(output) for output in alone]
    assert sum(steps[0].drafted) > (10 if method is ngram else 3)  # a suffix tree is choosy
    assert sum(steps[0].accepted) > 0
    # 61 tokens with the first one: three drafts and then two fit below the limit, if nothing is accepted.
    assert sum(steps[1].drafted) <= 3 + 2 + 1
    assert not any(steps[2].drafted)
    assert not any(steps[3].drafted)


QUICK = [(False, 3)]
ALL = [(right, k) for right in (False, True) for k in (1, 3, MOST_DRAFTS)]


@pytest.mark.parametrize(("right", "k"), quick_and_slow(QUICK, ALL))
def test_no_draft_reaches_the_drafter_limit(right: bool, k: int, tiny_llama: str, said: Record) -> None:
    """No drafter sees a context that leaves no room, and no draft lies at or past the limit."""

    def write(context: list[int], k: int) -> list[int]:
        truth = said.next(context, k)
        return truth if right else [(token + 1) % VOCAB for token in truth]

    script = drafters.play(write)
    with speculating(tiny_llama, custom("Scripted", k, max_model_len=LIMIT)) as llm:
        outputs = generate(llm, AROUND, greedy(NUM_TOKENS - k))
    check(outputs, said)
    assert all(script.calls), "a call without rows"
    assert all(len(context) < LIMIT for context, _ in script.rows())
    for prompt, output in zip(AROUND, outputs, strict=True):
        drafted, accepted = account(output)
        length, wanted = len(prompt) + 1, []
        while length < LIMIT:
            # Never more than fits, and never fewer: only the end of the request, far away here, could want fewer.
            wanted.append(min(k, LIMIT - length))
            length += 1 + right * wanted[-1]
        assert drafted == wanted, f"prompt of {len(prompt)}"
        assert accepted == (wanted if right else [0] * len(wanted))


def test_request_limits_its_number_of_drafts(tiny_llama: str, said: Record) -> None:
    """A request may lower the number of its drafts, or ask for none."""
    wishes = [None, 0, 1, 2, 9, 0]
    script = drafters.play(said.next)
    params = [greedy(32, extra_args=None if wish is None else {"num_speculative_tokens": wish}) for wish in wishes]
    with speculating(tiny_llama, custom("Scripted", 4)) as llm:
        outputs = generate(llm, SIX, params)
        steps = [account(output) for output in outputs]
        num_calls = len(script.calls)
        generate(llm, SIX[1:2], params[1])
        assert len(script.calls) == num_calls, "nobody wants a draft, and yet the drafter was called"
    check(outputs, said)
    for wish, (drafted, accepted) in zip(wishes, steps, strict=True):
        assert accepted == drafted
        assert max(drafted, default=0) == min(4 if wish is None else wish, 4)


@pytest.mark.parametrize("num_blocks", [None, 6])
def test_number_of_drafts_follows_the_load(num_blocks: int | None, tiny_llama: str, said: Record) -> None:
    """Up to two requests at a time draft four tokens each, more of them none; when the crowd is gone, the rest do.

    Three of the four tokens are right. With six blocks of KV, one of the requests is preempted.
    """

    def write(context: list[int], k: int) -> list[int]:
        truth = said.next(context, k)
        return [*truth[:3], *((token + 1) % VOCAB for token in truth[3:])]

    script = drafters.play(write)
    config = custom("Scripted", 4, num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 64, 0]])
    with speculating(tiny_llama, config, max_model_len=96, block_size=32, num_gpu_blocks_override=num_blocks) as llm:
        outputs = generate(llm, SIX[:4], [greedy(length) for length in (8, 8, 60, 60)])
        steps: list[Account] = [account(output) for output in outputs]
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") == sum(sum(s.drafted) for s in steps)
        assert counter(llm, "vllm:spec_decode_num_accepted_tokens") == sum(sum(s.accepted) for s in steps)
        assert (preemptions(llm) > 0) == (num_blocks is not None)
    check(outputs, said)
    assert not any(steps[0].drafted)
    assert not any(steps[1].drafted)
    for drafted, accepted in steps[2:]:
        assert max(drafted) == 4
        assert sum(drafted) > 30
        assert accepted == [min(number, 3) for number in drafted]
    assert max(len(call) for call in script.calls) <= 2
