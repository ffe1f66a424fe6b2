"""A drafter that knows what the target will say gains exactly its drafts and one token more, row by row and step by
step; what is wrong gains nothing."""

import random
from typing import Any

import pytest
from vllm import SamplingParams

from tests.full_tests import drafters
from tests.full_tests.drafters import Record
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import account, custom, speculating
from tests.full_tests.tiny_models import VOCAB
from tests.support.marks import quick_and_slow

NUM_TOKENS = 60
# The record goes on, so that there are right drafts for the last steps as well.
NUM_RECORDED = 80
PROMPTS = random_prompts([4, 40, 7, 130, 12, 64, 33, 90, 5, 21, 150, 48], VOCAB)
SAMPLING: list[dict[str, Any]] = [
    dict(temperature=0.8, top_p=0.95),
    dict(temperature=1.0),
    dict(temperature=1.3, min_p=0.02, logit_bias={5: 3.0, 77: 2.0}),
    dict(temperature=0.8, top_k=30, repetition_penalty=1.2, frequency_penalty=0.3),
]


def params(chance: str, num_tokens: int) -> list[SamplingParams]:
    length = dict(max_tokens=num_tokens, ignore_eos=True)
    if chance == "greedy":
        return [SamplingParams(temperature=0, **length) for _ in PROMPTS]
    return [SamplingParams(seed=100 + i, **SAMPLING[i % len(SAMPLING)], **length) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def records(tiny_llama: str) -> dict[str, Record]:
    with engine(tiny_llama) as llm:
        said = {c: first_tokens(generate(llm, PROMPTS, params(c, NUM_RECORDED))) for c in ("greedy", "seeded")}
    assert said["greedy"] != said["seeded"]
    return {chance: Record.of(PROMPTS, outputs) for chance, outputs in said.items()}


def run(model: str, k: int, rule: str, chance: str, record: Record, write: drafters.Write) -> Any:
    """All prompts in one batch: the same tokens as in the record, whatever is drafted."""
    script = drafters.play(write)
    with speculating(model, custom("Scripted", k, rejection_sample_method=rule)) as llm:
        outputs = generate(llm, PROMPTS, params(chance, NUM_TOKENS))
    for text, prompt, output in zip(record.texts, PROMPTS, first_tokens(outputs), strict=True):
        assert prompt + output == text[: len(prompt) + NUM_TOKENS]
    return script, outputs


def ragged(record: Record, rng: random.Random) -> drafters.Write:
    """0 to k right drafts, another number for every row and step, the extremes often."""
    return lambda context, k: record.next(context, rng.choice([0, k, rng.randint(0, k)]))


# Weightless drafts are one-hot, so every rule but the synthetic one has to take what is right.
RULES = ["strict", "standard", "block"]
ALL = [(k, rule, chance) for k in (1, 3, 5, 8, 16) for rule in RULES for chance in ("greedy", "seeded")]
QUICK = [(5, "standard", "greedy"), (5, "strict", "seeded")]


@pytest.mark.parametrize(("k", "rule", "chance"), quick_and_slow(QUICK, ALL))
def test_right_drafts_are_all_accepted(
    k: int, rule: str, chance: str, tiny_llama: str, records: dict[str, Record]
) -> None:
    record = records[chance]
    script, outputs = run(tiny_llama, k, rule, chance, record, ragged(record, random.Random(k)))
    for output in outputs:
        drafted, accepted = account(output)
        assert accepted == drafted
    gains = record.advances(script)
    assert {0, k} <= {drafted for drafted, _ in gains}
    assert all(gained == drafted + 1 for drafted, gained in gains), gains
    # Rows drafted different numbers in one and the same step.
    assert any(len({len(drafts) for _, drafts in call}) >= min(k, 3) for call in script.calls)


@pytest.mark.parametrize("chance", ["seeded", pytest.param("greedy", marks=pytest.mark.slow)])
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    chance: str, tiny_llama: str, records: dict[str, Record]
) -> None:
    """Right up to some place and wrong behind it: what is right is gained, and one token more."""
    record = records[chance]
    rng, k = random.Random(2), 5
    num_right: dict[tuple[int, int], int] = {}

    def write(context: list[int], k: int) -> list[int]:
        drafts = record.next(context, k)
        place = rng.randint(0, k)
        num_right[record.row(context), len(context)] = min(place, len(drafts))
        return [token if i < place else (token + 1) % VOCAB for i, token in enumerate(drafts)]

    script, outputs = run(tiny_llama, k, "standard", chance, record, write)
    assert all(gained <= drafted + 1 for drafted, gained in record.advances(script))
    for row, output in enumerate(outputs):
        length = len(PROMPTS[row]) + 1
        for drafted, accepted in zip(*account(output), strict=True):
            # Near the end fewer may be of use than were right.
            assert accepted == min(num_right[row, length], drafted)
            length += accepted + 1
        # The last token needs no draft.
        assert length >= len(PROMPTS[row]) + NUM_TOKENS - 1
