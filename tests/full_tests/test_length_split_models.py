"""test_length_split.py with drafters that are models, of the target's tokenizer and of another: they keep KV of their
own, so a row that stops to draft, or drafts less, must not disturb what was written for its neighbours."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from vllm import LLM, RequestOutput, SamplingParams

from tests.full_tests.drafters import Record
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.speculation import Account, account, speculating
from tests.full_tests.test_draft_model import drafting
from tests.full_tests.test_length_split import AROUND, CONTEXTS, LIMIT, SIX, check, greedy, repeating

K = 4
NUM_TOKENS = 64
ALIKE = [repeating(length, seed=length) for length in (24, 28, 32, 36)]


class Setup(NamedTuple):
    method: str
    drafter: str
    """A fixture: `looping_llama` is the target itself and `twin` the same with other ids, both always right."""
    by_load: tuple[tuple[int, int, int], ...] = ()
    match: str = ""
    """Where the drafter reads the text in its own tokens: how its drafts become the target's."""

    @property
    def right(self) -> bool:
        return self.drafter in ("looping_llama", "twin")

    def __str__(self) -> str:
        return "-".join(filter(None, [self.method, self.drafter, *map(str, self.by_load[1:]), self.match]))


SAME, OTHER = Setup("draft_model", "looping_llama"), Setup("universal_draft", "twin")
SAME_WRONG, OTHER_WRONG = Setup("draft_model", "cousin"), Setup("universal_draft", "stranger")
OWN_TOKENS = OTHER._replace(match="tli"), OTHER._replace(match="slem")
LESS, NONE = ((1, 2, K), (3, 64, 1)), ((1, 2, K), (3, 64, 0))


@pytest.fixture(scope="module")
def said(looping_llama: str) -> Record:
    """What the target says to each of the prompts, without speculation."""
    prompts = [*CONTEXTS, *AROUND, *SIX, *ALIKE]
    with engine(looping_llama) as llm:
        return Record.of(prompts, first_tokens(generate(llm, prompts, greedy(NUM_TOKENS))))


@pytest.fixture(scope="module")
def drafts(request: pytest.FixtureRequest, looping_llama: str, said: Record) -> Iterator[tuple[Setup, LLM]]:
    """One engine for all tests of a setup; pytest puts these next to each other."""
    setup: Setup = request.param
    config = drafting(request.getfixturevalue(setup.drafter), K, setup.method, max_model_len=LIMIT)
    if setup.by_load:
        config["num_speculative_tokens_per_batch_size"] = [list(step) for step in setup.by_load]
    reading = dict(universal_context="retokenize", universal_match=setup.match) if setup.match else {}
    with speculating(
        looping_llama, config, enable_prefix_caching=False, additional_config={"gaudi_spec": reading}
    ) as llm:
        yield setup, llm


def with_drafters(*setups: Setup, quick: tuple[Setup, ...] = ()) -> Any:
    cases = [pytest.param(setup, marks=[] if setup in quick else pytest.mark.slow) for setup in setups]
    return pytest.mark.parametrize("drafts", cases, indirect=True, ids=str)


def run(
    drafts: tuple[Setup, LLM], prompts: list[list[int]], params: list[SamplingParams], said: Record
) -> list[Account]:
    setup, llm = drafts
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


@with_drafters(SAME, OTHER, SAME_WRONG, OTHER_WRONG, *OWN_TOKENS, quick=(SAME, OTHER))
def test_long_rows_do_not_draft(drafts: tuple[Setup, LLM], said: Record) -> None:
    """And the short ones in their company draft and accept what they do alone."""
    setup, _ = drafts
    params = [greedy(40) for _ in CONTEXTS]
    together = run(drafts, CONTEXTS, params, said)
    assert together == [run(drafts, [prompt], params[:1], said)[0] for prompt in CONTEXTS]
    # Random tokens are hardly text: what is no UTF-8 can not be written anew.
    assert sum(together[0].drafted) > (5 if setup.match else 20)
    assert sum(together[1].drafted) <= 3 + 2 + 1
    assert not any(together[2].drafted)
    assert not any(together[3].drafted)
    if setup.match:
        assert right_share(together) > 0
    else:
        assert (right_share(together) > 0.95) == setup.right


@with_drafters(SAME, OTHER, SAME_WRONG, OTHER_WRONG)
def test_lengths_around_the_limit(drafts: tuple[Setup, LLM], said: Record) -> None:
    setup, _ = drafts
    accounts = run(drafts, AROUND, [greedy(NUM_TOKENS) for _ in AROUND], said)
    assert (right_share(accounts) > 0.95) == setup.right
    for prompt, steps in zip(AROUND, accounts, strict=True):
        assert bool(steps.drafted) == (len(prompt) + 1 < LIMIT)


@with_drafters(SAME, OTHER)
def test_each_row_its_own_number(drafts: tuple[Setup, LLM], said: Record) -> None:
    """A request may lower the number of its drafts, or ask for none; what it drafts is right all the same."""
    wishes = [None, 0, 1, 2, 9, 0]
    params = [greedy(32, extra_args=None if wish is None else {"num_speculative_tokens": wish}) for wish in wishes]
    accounts = run(drafts, SIX, params, said)
    for wish, steps in zip(wishes, accounts, strict=True):
        assert max(steps.drafted, default=0) == min(K if wish is None else wish, K)
    assert right_share(accounts) > 0.95


@with_drafters(SAME, OTHER, SAME_WRONG, OTHER_WRONG, *OWN_TOKENS)
def test_opting_out_leaves_the_others_alone(drafts: tuple[Setup, LLM], said: Record) -> None:
    out = greedy(40, extra_args={"num_speculative_tokens": 0})
    alone = [run(drafts, [prompt], [greedy(40)], said)[0] for prompt in ALIKE]
    mixed = run(drafts, ALIKE, [greedy(40), out, greedy(40), out], said)
    assert mixed[0::2] == alone[0::2]
    assert not any(sum(steps.drafted) for steps in mixed[1::2])


@with_drafters(*(setup._replace(by_load=by_load) for setup in (SAME, OTHER) for by_load in (LESS, NONE)))
def test_schedule_by_load(drafts: tuple[Setup, LLM], said: Record) -> None:
    """Four drafts each for up to two requests at a time; for more of them one or none."""
    setup, llm = drafts
    lengths = (8, 8, 60, 60)
    outputs = generate(llm, SIX[:4], [greedy(length) for length in lengths])
    check(outputs, said)
    steps = [account(output) for output in outputs]
    crowded = setup.by_load[-1][-1]
    for drafted, _ in steps[:2]:
        assert max(drafted, default=0) == crowded
    if crowded:
        # Rows that a step without drafts left behind may draft no more; see the user guide.
        for drafted, _ in steps[2:]:
            assert drafted[0] == crowded
            assert max(drafted) == K
            assert sum(drafted) > 20
        assert right_share(steps) > 0.95
