"""test_length_split.py with drafters that are models, of the target's tokenizer and of another, and with heads: they
keep KV of their own, so a row that stops to draft, or drafts less, must not disturb what was written for its
neighbors."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
from vllm import LLM, RequestOutput, SamplingParams

from tests.full_tests.drafters import Record
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.heads import head
from tests.full_tests.heads import target as target_of
from tests.full_tests.speculation import Account, account, speculating
from tests.full_tests.test_draft_model import drafting
from tests.full_tests.test_length_split import AROUND, CONTEXTS, LIMIT, SIX, check, greedy, repeating

K = 4
NUM_TOKENS = 64
ALIKE = [repeating(length, seed=length) for length in (24, 28, 32, 36)]


class Setup(NamedTuple):
    method: str
    drafter: str = ""
    """A fixture: `looping_llama` is the target itself and `twin` the same with other ids, both always right. A head
    comes with a target of its own."""
    by_load: tuple[tuple[int, int, int], ...] = ()
    match: str = ""
    """Where the drafter reads the text in its own tokens: how its drafts become the target's."""

    @property
    def right(self) -> bool:
        return self.drafter in ("looping_llama", "twin")

    @property
    def is_head(self) -> bool:
        return not self.drafter

    def __str__(self) -> str:
        return "-".join(filter(None, [self.method, self.drafter, *map(str, self.by_load[1:]), self.match]))


SAME, OTHER = Setup("draft_model", "looping_llama"), Setup("universal_draft", "twin")
SAME_WRONG, OTHER_WRONG = Setup("draft_model", "cousin"), Setup("universal_draft", "stranger")
HEAD = Setup("eagle")
OWN_TOKENS = OTHER._replace(match="tli"), OTHER._replace(match="slem")
LESS, NONE = ((1, 2, K), (3, 64, 1)), ((1, 2, K), (3, 64, 0))


@pytest.fixture(scope="module")
def said() -> Callable[[str], Record]:
    """What a target says to each of the prompts, without speculation."""

    @cache
    def record(target: str) -> Record:
        prompts = [*CONTEXTS, *AROUND, *SIX, *ALIKE]
        with engine(target) as llm:
            return Record.of(prompts, first_tokens(generate(llm, prompts, greedy(NUM_TOKENS))))

    return record


class Drafting(NamedTuple):
    setup: Setup
    llm: LLM
    said: Record


@pytest.fixture(scope="module")
def drafts(request: pytest.FixtureRequest, looping_llama: str, said: Callable[[str], Record]) -> Iterator[Drafting]:
    """One engine for all tests of a setup; pytest puts these next to each other."""
    setup: Setup = request.param
    if setup.is_head:
        target, config = target_of(setup.method), head(setup.method, K, max_model_len=LIMIT)
    else:
        target = looping_llama
        config = drafting(request.getfixturevalue(setup.drafter), K, setup.method, max_model_len=LIMIT)
    if setup.by_load:
        config["num_speculative_tokens_per_batch_size"] = [list(step) for step in setup.by_load]
    reading = dict(universal_context="retokenize", universal_match=setup.match) if setup.match else {}
    record = said(target)
    with speculating(target, config, enable_prefix_caching=False, additional_config={"gaudi_spec": reading}) as llm:
        yield Drafting(setup, llm, record)


def with_drafters(*setups: Setup, quick: tuple[Setup, ...] = ()) -> Any:
    cases = [pytest.param(setup, marks=[] if setup in quick else pytest.mark.slow) for setup in setups]
    return pytest.mark.parametrize("drafts", cases, indirect=True, ids=str)


def run(drafts: Drafting, prompts: list[list[int]], params: list[SamplingParams]) -> list[Account]:
    setup, llm, said = drafts
    outputs = generate(llm, prompts, params)
    check(outputs, said)
    # A drafter that reads text may have less to say, or nothing, behind tokens that it would not write itself.
    return [
        account(output) if setup.match else exact_account(output, wishes)
        for output, wishes in zip(outputs, params, strict=True)
    ]


def exact_account(output: RequestOutput, params: SamplingParams) -> Account:
    """Checked on the way: each step drafted what its own row had use for, and never up to or past the limit."""
    steps, num_prompt = account(output), len(output.prompt_token_ids)
    most = min((params.extra_args or {}).get("num_speculative_tokens", K), K)
    reach, length = min(LIMIT, num_prompt + params.max_tokens - 1), num_prompt + 1
    wanted: list[int] = []
    for accepted in steps.accepted:
        wanted.append(min(most, reach - length))
        length += 1 + accepted
    assert steps.drafted == wanted, f"prompt of {num_prompt}"
    assert length >= reach or not most, f"prompt of {num_prompt} stopped to draft at {length}"
    return steps


def right_share(accounts: list[Account]) -> float:
    return sum(sum(steps.accepted) for steps in accounts) / sum(sum(steps.drafted) for steps in accounts)


@with_drafters(SAME, OTHER, SAME_WRONG, OTHER_WRONG, *OWN_TOKENS, HEAD, quick=(SAME, OTHER, HEAD))
def test_long_rows_do_not_draft(drafts: Drafting) -> None:
    """And the short ones in their company draft and accept what they do alone."""
    setup = drafts.setup
    params = [greedy(40) for _ in CONTEXTS]
    together = run(drafts, CONTEXTS, params)
    assert together == [run(drafts, [prompt], params[:1])[0] for prompt in CONTEXTS]
    # Random tokens are hardly text: what is no UTF-8 cannot be written anew.
    assert sum(together[0].drafted) > (5 if setup.match else 20)
    assert sum(together[1].drafted) <= 3 + 2 + 1
    assert not any(together[2].drafted)
    assert not any(together[3].drafted)
    if setup.match:
        assert right_share(together) > 0
    else:
        assert (right_share(together) > 0.95) == setup.right


@with_drafters(SAME, OTHER, SAME_WRONG, OTHER_WRONG, HEAD, quick=(HEAD,))
def test_lengths_around_the_limit(drafts: Drafting) -> None:
    setup = drafts.setup
    accounts = run(drafts, AROUND, [greedy(NUM_TOKENS) for _ in AROUND])
    assert (right_share(accounts) > 0.95) == setup.right
    for prompt, steps in zip(AROUND, accounts, strict=True):
        assert bool(steps.drafted) == (len(prompt) + 1 < LIMIT)


@with_drafters(SAME, OTHER, HEAD, quick=(HEAD,))
def test_each_row_its_own_number(drafts: Drafting) -> None:
    """A request may lower the number of its drafts, or ask for none; what it drafts is right all the same."""
    wishes = [None, 0, 1, 2, 9, 0]
    params = [greedy(32, extra_args=None if wish is None else {"num_speculative_tokens": wish}) for wish in wishes]
    accounts = run(drafts, SIX, params)
    for wish, steps in zip(wishes, accounts, strict=True):
        assert max(steps.drafted, default=0) == min(K if wish is None else wish, K)
    assert (right_share(accounts) > 0.95) == drafts.setup.right


@with_drafters(SAME, OTHER, SAME_WRONG, OTHER_WRONG, *OWN_TOKENS, HEAD, quick=(HEAD,))
def test_opting_out_leaves_the_others_alone(drafts: Drafting) -> None:
    out = greedy(40, extra_args={"num_speculative_tokens": 0})
    alone = [run(drafts, [prompt], [greedy(40)])[0] for prompt in ALIKE]
    mixed = run(drafts, ALIKE, [greedy(40), out, greedy(40), out])
    assert mixed[0::2] == alone[0::2]
    assert not any(sum(steps.drafted) for steps in mixed[1::2])


@with_drafters(*(setup._replace(by_load=by_load) for setup in (SAME, OTHER, HEAD) for by_load in (LESS, NONE)))
def test_schedule_by_load(drafts: Drafting) -> None:
    """Four drafts each for up to two requests at a time; for more of them one or none."""
    setup, llm, said = drafts
    lengths = (8, 8, 60, 60)
    outputs = generate(llm, SIX[:4], [greedy(length) for length in lengths])
    check(outputs, said)
    steps = [account(output) for output in outputs]
    crowded = setup.by_load[-1][-1]
    for drafted, _ in steps[:2]:
        assert max(drafted, default=0) == crowded
    # Rows that a step without drafts left behind may draft no more; see the user guide. A head has read all the same.
    if crowded or setup.is_head:
        for drafted, _ in steps[2:]:
            assert drafted[0] == (crowded or K)
            assert max(drafted) == K
            assert sum(drafted) > 20
        assert (right_share(steps) > 0.95) == setup.right
